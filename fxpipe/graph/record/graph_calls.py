"""The callables that traced and stage graphs contain besides torch's and the user's.

fx writes a graph as Python code that refers to each callable by its name; these
have one, survive a deep copy as themselves, and hold no state of the model.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.graph.dims import evaluate, text
from fxpipe.graph.facts import Ambient
from fxpipe.graph.nested import closed_over

__all__ = [
    "ACCESS",
    "Applied",
    "Constant",
    "Formula",
    "Fresh",
    "OnlyIf",
    "Rebuild",
    "Refusal",
    "TensorConstant",
    "TracedDtype",
    "Within",
    "after",
    "cell_of",
    "child_of",
    "device_of",
    "dtype_of",
    "given",
    "like",
    "or_zeros",
    "overwrite",
]


def child_of(value: Any, index: int) -> Any:
    """Return one child of a value that is registered with torch's pytree."""
    return pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0][index]


def cell_of(function: Any, index: int) -> Any:
    """Return one of the values that a function closes over."""
    return closed_over(function)[index]


# How to follow each kind of accessor of `structure`.
ACCESS: dict[str, Callable[..., Any]] = {
    "item": operator.getitem,
    "attr": getattr,
    "child": child_of,
    "cell": cell_of,
}


def given(value: Any) -> Any:
    """Return `value`: a list or dict that needs an identity because a call changes it."""
    return value


def after(value: Any, change: Any) -> Any:
    """Return `value`; the second argument orders this after the call that changed it."""
    return value


class Rebuild:
    """A callable that builds a nested value from its children; one level only."""

    def __init__(self, kind: type, make: Callable[[tuple[Any, ...]], Any]) -> None:
        self._make = make
        self.__name__ = self.__qualname__ = f"make_{kind.__name__}"
        self.__module__ = __name__

    def __call__(self, *children: Any) -> Any:
        return self._make(children)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebuild:
        return self


class Applied:
    """A callable that applies a `torch.autograd.Function`, with its own backward."""

    def __init__(self, function: type) -> None:
        self._function: Any = function
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        return self._function.apply(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        return self


class Constant:
    """A callable that returns an object which graph code cannot write down."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.__name__ = self.__qualname__ = f"constant_{type(value).__name__}"
        self.__module__ = __name__

    def __call__(self) -> Any:
        return self._value

    def __deepcopy__(self, memo: dict[int, Any]) -> Constant:
        return self


class Fresh(Constant):
    """A callable that returns a new copy of an object each time."""

    def __call__(self) -> Any:
        return copy.deepcopy(self._value)


class TensorConstant(Constant):
    """A callable that returns a tensor which is no parameter or buffer, on a device."""

    def __call__(self, device: Any = None) -> Any:
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


class Refusal:
    """A callable that raises: what was traced in this mode cannot be run."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.__name__ = self.__qualname__ = "refuse"
        self.__module__ = __name__

    def __call__(self) -> None:
        raise TraceError(self.message)

    def __deepcopy__(self, memo: dict[int, Any]) -> Refusal:
        return self


def or_zeros(value: Any, shape: tuple[int, ...], dtype: Any, device: Any) -> torch.Tensor:
    """Return the value, or zeros if this mode does not compute it."""
    return torch.zeros(shape, dtype=dtype, device=device) if value is None else value


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


class Formula:
    """A callable that computes a size from others."""

    def __init__(self, expr: sympy.Basic, names: Sequence[str]) -> None:
        self._expr = expr
        self._names = tuple(names)
        self.__name__ = self.__qualname__ = "size_" + "".join(
            c if c.isalnum() else "_" for c in text(expr)
        )
        self.__module__ = __name__

    def __call__(self, *sizes: int) -> Any:
        return evaluate(self._expr, dict(zip(self._names, sizes, strict=True)))

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Formula:
        return self


class Within:
    """A callable that runs another under the settings it was traced with."""

    def __init__(self, ambient: Ambient, target: Any) -> None:
        self._ambient = ambient
        self._target = target
        name = getattr(target, "__name__", str(target or "call"))
        words = ["no_grad"] if ambient.grad is False else []
        words += ["autocast"] if ambient.autocast else []
        self.__name__ = self.__qualname__ = "_".join([name, *words])
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if self._ambient.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self._ambient.grad))
            for kind, dtype, enabled, cache in self._ambient.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                )
            return _call(self._target, args, kwargs)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Within:
        return self


class OnlyIf:
    """A callable that runs another in one mode only; its first argument is the flag."""

    def __init__(self, training: bool, target: Any) -> None:
        self._training = training
        self._target = target
        name = getattr(target, "__name__", str(target or "call"))
        self.__name__ = self.__qualname__ = f"{name}_if_{'training' if training else 'evaluating'}"
        self.__module__ = __name__

    def __call__(self, training: bool, *args: Any, **kwargs: Any) -> Any:
        return _call(self._target, args, kwargs) if training is self._training else None

    def __deepcopy__(self, memo: Mapping[int, Any]) -> OnlyIf:
        return self


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, a method by its name, or the module that is the first argument."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs) if target is not None else args[0](*args[1:], **kwargs)
