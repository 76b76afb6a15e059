"""Models by name, with example inputs, targets and a loss.

    gpt?layers=8                      an example model, and its options
    mine/model.py:build?layers=8      a factory in a file
    package.module:factory            a factory in a module
    hf:llama?num_hidden_layers=4      a Hugging Face configuration; see `huggingface`
    llama3-70b                        a known model without weights, to plan with

Example inputs come from what the user names (`--inputs`), else from a function
`example_inputs(batch_size)` beside the factory; likewise `example_target` and `loss_fn`.
A function is called with the batch size first, and with what it accepts of seed, dtype, length
and the options of the model's name.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxpipe.cli.named.references import find_attribute, load_module, load_object, parse_reference
from fxpipe.errors import InputError
from fxpipe.planner.known_models import KNOWN, known_model

__all__ = [
    "FactoryModel",
    "Inputs",
    "KnownModel",
    "ModelRequest",
    "NamedModel",
    "as_inputs",
    "call_with",
    "resolve",
]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call of a model, by position and by name."""

_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """All that a user may say about a model; plain words and numbers.

    `inputs`, `target` and `loss` name functions that go before the model's own.
    """

    name: str
    seq: int | None = None
    inputs: str | None = None
    target: str | None = None
    loss: str | None = None
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InputError(f"dtype is one of {', '.join(_DTYPES)}; got {self.dtype!r}")
        if self.seq is not None and self.seq < 1:
            raise InputError(f"the sequence length must be at least 1, got {self.seq}")

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def resolve(request: ModelRequest) -> NamedModel:
    """The model that a request means; nothing is built yet.

    Raises:
        InputError: there is no such file, module, factory or configuration.
    """
    if request.name.startswith("hf:"):
        from fxpipe.cli.named.huggingface import HuggingFaceModel

        return HuggingFaceModel(request)
    if request.name.lower() in KNOWN:
        return KnownModel(request)
    return FactoryModel(request)


class NamedModel(ABC):
    """A model that can be built, with what it takes to run it."""

    is_built_on_meta_by_default = False

    def __init__(self, request: ModelRequest) -> None:
        self.request = request

    @property
    @abstractmethod
    def title(self) -> str:
        """A short name for headings."""

    @abstractmethod
    def _make(self) -> Any: ...

    @abstractmethod
    def _own_inputs(self, batch: int, seed: int) -> Any: ...

    @abstractmethod
    def _own_target(self, batch: int, seed: int) -> Any: ...

    @abstractmethod
    def _own_loss(self) -> Callable[..., Any]: ...

    def build(self, *, meta: bool | None = False) -> nn.Module:
        """The model with weights drawn from the seed, or with no weights at all (meta).

        None is what such models are by default.

        Raises:
            InputError: the factory does not take the options, or makes no module.
        """
        on_meta = self.is_built_on_meta_by_default if meta is None else meta
        torch.manual_seed(self.request.seed)
        with torch.device("meta") if on_meta else nullcontext():
            model = self._make()
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.request.name!r} made a {type(model).__name__}; "
                "it must be a torch.nn.Module or a function that returns one"
            )
        return model.to(self.request.torch_dtype)

    def inputs(self, batch: int, seed: int = 0) -> Inputs:
        """Example inputs with `batch` rows; the same seed gives the same values."""
        if batch < 1:
            raise InputError(f"the batch size must be at least 1, got {batch}")
        if self.request.inputs is not None:
            return as_inputs(self._given(self.request.inputs, "--inputs", batch, seed))
        return as_inputs(self._own_inputs(batch, seed))

    def target(self, batch: int, seed: int = 0) -> Any:
        """A target for the example inputs of the same seed."""
        if self.request.target is not None:
            return self._given(self.request.target, "--target", batch, seed)
        return self._own_target(batch, seed)

    @property
    def loss_fn(self) -> Callable[..., Any]:
        """`loss_fn(output, target)`."""
        if self.request.loss is None:
            return self._own_loss()
        return _function(self.request.loss, "--loss")

    def _given(self, name: str, option: str, batch: int, seed: int) -> Any:
        function, options = _function(name, option), parse_reference(name).options
        return call_with(function, name, self.request, batch, seed, options)


def _function(name: str, option: str) -> Callable[..., Any]:
    found: Any = load_object(name, what=option)
    if not callable(found):
        raise InputError(f"{option} {name!r} is no function")
    made: Callable[..., Any] = found
    return made


class FactoryModel(NamedModel):
    """A model made by a function, a class, or simply found in a module."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._reference = parse_reference(request.name)

    @property
    def title(self) -> str:
        return str(self._reference)

    @cached_property
    def module(self) -> ModuleType:
        """The module that the factory is in."""
        return load_module(self._reference.place)

    @cached_property
    def _factory(self) -> Any:
        reference = self._reference
        if not reference.attribute:
            if not hasattr(self.module, "build"):
                raise InputError(
                    f"{reference.place} has no function 'build'; "
                    f"name the factory: {reference.place}:name"
                )
            return self.module.build
        return find_attribute(self.module, reference)

    def _make(self) -> Any:
        factory, options = self._factory, dict(self._reference.options)
        if isinstance(factory, nn.Module):
            if options:
                raise InputError(f"{self.title} is a module already and takes no options")
            return factory
        if not callable(factory):
            return factory
        parameters = _parameters(factory)
        if "seed" in parameters:
            options.setdefault("seed", self.request.seed)
        missing = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and name not in options
        ]
        if missing:
            raise InputError(
                f"{self.title} needs {', '.join(missing)}; "
                f"add options to its name: {self.title}?{missing[0]}=..."
            )
        return _call(factory, self.title, (), options, self._reference.options)

    def _own_inputs(self, batch: int, seed: int) -> Any:
        name, function = self._beside("example_inputs", "batch_size", "--inputs file.py:function")
        return call_with(function, name, self.request, batch, seed, self._reference.options)

    def _own_target(self, batch: int, seed: int) -> Any:
        name, function = self._beside("example_target", "batch_size", "--target file.py:function")
        return call_with(function, name, self.request, batch, seed, self._reference.options)

    def _own_loss(self) -> Callable[..., Any]:
        example = "--loss file.py:function, for example torch.nn.functional:mse_loss"
        return self._beside("loss_fn", "output, target", example)[1]

    def _beside(self, name: str, takes: str, option: str) -> tuple[str, Callable[..., Any]]:
        """A function in the factory's module, and what to call it in errors."""
        place = self._reference.place
        function: Callable[..., Any] | None = getattr(self.module, name, None)
        if function is None:
            raise InputError(
                f"{place} has no function {name}({takes}); add one, or name one with {option}"
            )
        return f"{place}:{name}", function


def as_inputs(made: Any) -> Inputs:
    """Arguments from what a function returned: `(args, kwargs)`, a tuple, a dict or one value."""
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, tuple | list):
        if len(made) == 2 and isinstance(made[0], tuple | list) and isinstance(made[1], Mapping):
            return tuple(made[0]), dict(made[1])
        return tuple(made), {}
    return (made,), {}


def call_with(
    function: Callable[..., Any],
    name: str,
    request: ModelRequest,
    batch: int,
    seed: int,
    options: Mapping[str, Any],
) -> Any:
    """Call a function with the batch size, and what it accepts of seed, dtype, length, options."""
    parameters = _parameters(function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {key: value for key, value in options.items() if takes_any or key in parameters}
    for key, value in (("seed", seed), ("dtype", request.torch_dtype)):
        if key in parameters:
            given.setdefault(key, value)
    if request.seq is not None:
        if "length" not in parameters:
            raise InputError(
                f"{name} takes no length; give it as an option of the model's name instead of "
                "--seq: ?length=..."
            )
        given["length"] = request.seq
    return _call(function, name, (batch,), given, options)


def _call(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """Call a user's function; options of the model's name that do not fit are a mistake."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if options and "unexpected keyword argument" in str(error):
            given = ", ".join(options)
            raise InputError(f"{name} was given the options {given}, but {error}") from error
        raise


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


class KnownModel(NamedModel):
    """A published model by its name; it exists on the meta device only."""

    is_built_on_meta_by_default = True

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self.sizes = KNOWN[request.name.lower()]

    @property
    def title(self) -> str:
        return self.request.name

    @property
    def length(self) -> int:
        return self.request.seq or self.sizes.length

    def build(self, *, meta: bool | None = True) -> nn.Module:
        if meta is False:
            raise InputError(f"{self.title} has no weights here: it is for planning only")
        return known_model(self.sizes, sequence=self.length, dtype=self.request.torch_dtype)[0]

    def _make(self) -> Any:
        return self.build()

    def _own_inputs(self, batch: int, seed: int) -> Any:
        return (torch.zeros(batch, self.length, dtype=torch.long, device="meta"),)

    def _own_target(self, batch: int, seed: int) -> Any:
        return torch.zeros(batch, self.length, dtype=torch.long, device="meta")

    def _own_loss(self) -> Callable[..., Any]:
        raise InputError(f"{self.title} has no weights here: it is for planning only")
