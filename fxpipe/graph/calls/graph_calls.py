"""The callables that traced and stage graphs contain besides torch's and the user's.

fx writes a graph as Python code that refers to each callable by its name; these
have one, survive a deep copy as themselves, and hold no state of the model.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import sympy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError
from fxpipe.graph.dims import evaluate, text
from fxpipe.graph.facts import Ambient
from fxpipe.graph.nested import closed_over, walk
from fxpipe.torch_inside import FakeTensor, function_modes, pytree

__all__ = [
    "ACCESS",
    "Applied",
    "Constant",
    "Formula",
    "Fresh",
    "GraphCall",
    "Hooked",
    "Kept",
    "Mapped",
    "Observed",
    "OnlyIf",
    "Rebuild",
    "Refusal",
    "Scripted",
    "TensorConstant",
    "TracedDtype",
    "Within",
    "after",
    "blank",
    "cell_of",
    "child_of",
    "device_of",
    "dtype_of",
    "function_modes",
    "given",
    "has_no_values",
    "like",
    "or_zeros",
    "overwrite",
]


def child_of(value: object, index: int) -> object:
    """Return one child of a value that is registered with torch's pytree."""
    return pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0][index]


def cell_of(function: object, index: int) -> object:
    """Return one of the values that a function closes over."""
    return closed_over(function)[index]


# How to follow each kind of accessor of `structure`.
ACCESS: dict[str, Callable[..., object]] = {
    "item": operator.getitem,
    "attr": getattr,
    "child": child_of,
    "cell": cell_of,
}


def given(value: Any) -> Any:
    """Return `value`: a list or dict that needs an identity because a call changes it."""
    return value


def after(value: object, change: object) -> object:
    """Return `value`; the second argument orders this after the call that changed it."""
    return value


class GraphCall:
    """A callable of ours in a graph: it has a name, and a deep copy of it is itself."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Rebuild(GraphCall):
    """A callable that builds a nested value from its children; one level only."""

    def __init__(self, kind: type, make: Callable[[tuple[object, ...]], object]) -> None:
        super().__init__(f"make_{kind.__name__}")
        self._make = make

    def __call__(self, *children: object) -> object:
        return self._make(children)


class Applied(GraphCall):
    """A callable that applies a `torch.autograd.Function`, with its own backward."""

    def __init__(self, function: type) -> None:
        super().__init__(function.__name__)
        self._function: Any = function

    def __call__(self, *args: object) -> object:
        return self._function.apply(*args)


class Scripted(GraphCall):
    """A callable that runs a function which `torch.jit.script` has compiled."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function.__name__)
        self._function = function

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)


class Constant(GraphCall):
    """A callable that returns an object which graph code cannot write down."""

    def __init__(self, value: Any) -> None:
        super().__init__(f"constant_{type(value).__name__}")
        self._value = value

    def __call__(self) -> object:
        return self._value


class Fresh(Constant):
    """A callable that returns a new copy of an object each time."""

    def __call__(self) -> object:
        return copy.deepcopy(self._value)


class TensorConstant(Constant):
    """A callable that returns a tensor which is no parameter or buffer, on a device."""

    def __call__(self, device: torch.device | None = None) -> Any:
        return self._value if device is None else self._value.to(device)


def overwrite(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Give a buffer a new value, as an assignment to the attribute does."""
    with torch.no_grad():
        buffer.copy_(value)


class TracedDtype(Constant):
    """A callable that returns a dtype that follows the model's, or a limit of it, as traced."""

    def __init__(self, dtype: torch.dtype, limit: str | None) -> None:
        super().__init__(dtype if limit is None else getattr(torch.finfo(dtype), limit))
        self.dtype, self.limit = dtype, limit


class Refusal(GraphCall):
    """A callable that raises: what was traced in this mode cannot be run."""

    def __init__(self, message: str) -> None:
        super().__init__("refuse")
        self.message = message

    def __call__(self) -> None:
        raise TraceError(self.message)


def or_zeros(
    value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the value, or zeros if this mode does not compute it."""
    return torch.zeros(shape, dtype=dtype, device=device) if value is None else value


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without memory for code that reads its size."""
    return torch.zeros((), dtype=dtype, device=device).expand(*shape)


def like(value: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
    """Return the value in the dtype of a module's parameters, for code that reads it off."""
    if module is None:
        return value
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    return value.detach().to(dtype)


def dtype_of(value: Any, limit: str | None) -> Any:
    """Return the floating dtype of a tensor or of a module's parameters, or a limit of it."""
    if isinstance(value, nn.Module):
        value = next(p for p in value.parameters() if p.is_floating_point())
    return value.dtype if limit is None else getattr(torch.finfo(value.dtype), limit)


def device_of(value: Any) -> torch.device:
    """Return the device of a tensor or of a module's parameters."""
    if isinstance(value, nn.Module):
        value = next(value.parameters())
    return torch.device("cpu") if value is None else value.device


class Formula(GraphCall):
    """A callable that computes a size from others."""

    def __init__(self, expr: sympy.Basic, names: Sequence[str]) -> None:
        super().__init__("size_" + "".join(c if c.isalnum() else "_" for c in text(expr)))
        self._expr = expr
        self._names = tuple(names)

    def __call__(self, *sizes: int) -> object:
        return evaluate(self._expr, dict(zip(self._names, sizes, strict=True)))


class Within(GraphCall):
    """A callable that runs another under the settings it was traced with."""

    def __init__(self, ambient: Ambient, target: object) -> None:
        name = getattr(target, "__name__", str(target or "call"))
        words = ["no_grad"] if ambient.grad is False else []
        words += ["autocast"] if ambient.autocast else []
        super().__init__("_".join([name, *words]))
        self._ambient = ambient
        self._target = target

    def __call__(self, *args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            if self._ambient.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self._ambient.grad))
            for kind, dtype, enabled, cache in self._ambient.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                )
            return _call(self._target, args, kwargs)


class OnlyIf(GraphCall):
    """A callable that runs another in one mode only; its first argument is the flag."""

    def __init__(self, training: bool, target: object) -> None:
        name = getattr(target, "__name__", str(target or "call"))
        super().__init__(f"{name}_if_{'training' if training else 'evaluating'}")
        self._training = training
        self._target = target

    def __call__(self, training: bool, *args: object, **kwargs: object) -> object:
        return _call(self._target, args, kwargs) if training is self._training else None


class Mapped(GraphCall):
    """A callable that runs a function under `torch.vmap`, and under the modes around it.

    Inside vmap tensors have no storage and no size of their own that a trace could
    follow, so the mapped function is not looked into. What it closes over travels as
    arguments (see `nested.branch`).
    """

    def __init__(self, modes: Sequence[TorchFunctionMode]) -> None:
        super().__init__("vmap")
        self._modes = tuple(modes)

    def __call__(
        self, function: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any,
        *args: object, **kwargs: object,
    ) -> object:  # fmt: skip
        active = function_modes()
        with ExitStack() as stack:
            for mode in self._modes:
                if mode not in active:
                    stack.enter_context(mode)
            mapped = torch.vmap(
                function, in_dims, out_dims, randomness=randomness, chunk_size=chunk_size
            )
            return mapped(*args, **kwargs)


class Hooked(GraphCall):
    """A callable that registers a hook on a tensor, in the stage that makes the tensor."""

    def __init__(self, hook: Callable[..., object]) -> None:
        super().__init__("register_hook")
        self._hook = hook

    def __call__(self, value: torch.Tensor) -> None:
        if value.requires_grad:
            value.register_hook(self._hook)  # type: ignore[no-untyped-call]


class Observed(GraphCall):
    """A callable that shows values to a hook of a module that is split, in the stage."""

    def __init__(self, hook: Callable[..., object], module: nn.Module) -> None:
        super().__init__(f"hook_of_{type(module).__name__}")
        self._hook = hook
        self._module = weakref.ref(module)

    def __call__(self, *values: object) -> None:
        if not has_no_values(values):
            self._hook(self._module(), *values)

    def __reduce__(self) -> tuple[object, ...]:
        return given, (None,)


class Kept(GraphCall):
    """A callable that leaves a value where opened code does: in a module, an object, a dict.

    With `refills` it puts the parts of a list into the list that is there. A run on fake
    tensors leaves nothing.
    """

    def __init__(self, holder: object, key: Any, *, refills: bool = False) -> None:
        self._refills = refills
        super().__init__(f"keep_{key}" if str(key).isidentifier() else "keep")
        # Weakly: a stage keeps no module alive that it does not run.
        is_module = isinstance(holder, nn.Module)
        self._holder: Callable[[], object] = weakref.ref(holder) if is_module else lambda: holder
        self._key = key

    def __call__(self, value: Any) -> None:
        holder = self._holder()
        if holder is None or has_no_values(value) or isinstance(torch.empty(0), FakeTensor):
            return
        place = holder if isinstance(holder, dict) else vars(holder)
        if self._refills:
            place[self._key][:] = value
        else:
            place[self._key] = value

    def __reduce__(self) -> tuple[object, ...]:
        return given, (None,)


def has_no_values(value: object) -> bool:
    """Say whether a tensor without data is inside a value."""
    tensors = [leaf for _, leaf in walk(value) if isinstance(leaf, torch.Tensor)]
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, a method by its name, or the module that is the first argument."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs) if target is not None else args[0](*args[1:], **kwargs)
