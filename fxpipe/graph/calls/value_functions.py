"""Functions that compute indices from whole numbers, as one call each in the graph.

Vision-language models have helpers that take the grids of the images, or the token ids, and
return positions: they loop over rows and read values, so their code is no graph. But what they
need is their arguments, and they have no gradient. So a stage calls such a function itself.

In:  the functions that were running when opened code asked for a value (`Found`).
Out: a `ValueFunction`, if the function is one: it gets whole numbers that follow from the model's
     inputs, returns the same when called again, and changes nothing.

A method of a module gets a shell in place of the module: an object of its class with the
attributes that its code mentions and no parameters. Code that needs more is opened as before.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fxpipe.graph.calls.graph_calls import GraphCall
from fxpipe.graph.nested import Args, Kwargs, contents, has_tensor, walk
from fxpipe.graph.sandbox.patches import patched
from fxpipe.graph.source_line import is_users
from fxpipe.torch_inside import memory_of

__all__ = ["Found", "ValueFunction", "running_functions", "watched_functions"]

OnCall = Callable[[Callable[..., object], Args, Kwargs], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A function by the class or Python module that has it, and its name there."""

    holder: object
    name: str


class ValueFunction(GraphCall):
    """A callable that runs a function of whole numbers, or a method of a shell."""

    def __init__(self, function: Callable[..., object], owner: nn.Module | None) -> None:
        super().__init__(function.__name__)
        self._function = function
        self._key = (function, id(owner))
        self._shells = () if owner is None else (_shell(owner, _mentioned(function, owner)),)

    def __eq__(self, other: object) -> bool:
        # A trace in each mode makes a call of its own: they are the same.
        return type(other) is type(self) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*self._shells, *args, **kwargs)

    def checked(self, *args: object, **kwargs: object) -> object:
        """Return what the function returns, if that is all it does.

        Raises:
            ValueError: it draws random numbers, changes an argument, returns one, or returns
                something else the second time.
        """
        inputs = (self._shells and vars(self._shells[0]), args, kwargs)
        tensors = [leaf for _, leaf in walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = contents(inputs), [tensor.clone() for tensor in tensors], torch.get_rng_state()
        found = [self(*args, **kwargs) for _ in range(2)]
        made = [[leaf for _, leaf in walk(output)] for output in found]
        is_pure = (
            contents(inputs) == before[0]
            and all(map(torch.equal, tensors, before[1]))
            and torch.equal(torch.get_rng_state(), before[2])
            and len(made[0]) == len(made[1])
            and all(map(_is_same, *made))
        )
        memory = {memory_of(tensor) for tensor in tensors}
        results = [leaf for leaf in made[0] if isinstance(leaf, torch.Tensor)]
        if not is_pure or any(memory_of(t) in memory or t.requires_grad for t in results):
            raise ValueError(f"{self.__name__} does more than to return something")
        return found[0]


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _mentioned(function: Callable[..., object], owner: nn.Module) -> set[str]:
    """Return the names in a method's code, and in that of the methods it mentions."""
    found: set[str] = set()
    codes = [inspect.unwrap(function).__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in set(code.co_names) - found:
            found.add(name)
            method = inspect.getattr_static(type(owner), name, None)
            method = method.fget if isinstance(method, property) else method
            method = getattr(method, "__func__", method)
            if isinstance(method, types.FunctionType):
                codes.append(inspect.unwrap(method).__code__)
    return found


def _shell(module: nn.Module, names: Collection[str]) -> nn.Module:
    """Return an object of a module's class that has some of its attributes, and no tensors."""
    made = object.__new__(type(module))
    vars(made).update(vars(nn.Module()))
    usual = {*vars(made), "training"}
    for name, value in vars(module).items():
        if name in names and name not in usual and not has_tensor(value):
            vars(made)[name] = value
    made.training = module.training
    for name, part in module.named_children():
        if name in names:
            made.add_module(name, _shell(part, names))
    return made


def running_functions(owner: nn.Module) -> Iterator[Found]:
    """Yield the functions that a module's forward has called and that have not returned."""
    end = inspect.unwrap(type(owner).forward).__code__
    frame = sys._getframe(1)
    frames: list[types.FrameType] = []
    while frame is not None and frame.f_code is not end:
        if is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return
    frames.append(frame)
    for index, one in enumerate(frames[:-1]):
        found = _holder(one, frames[index + 1 :])
        if found is not None:
            yield found


def _holder(frame: types.FrameType, callers: list[types.FrameType]) -> Found | None:
    """Return where a running function is found: in the class of its `self`, or by a caller."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, nn.Module):
        for kind in type(first).__mro__:
            if _has_code(kind.__dict__.get(code.co_name), code):
                return Found(kind, code.co_name)
    for caller in callers:
        if _has_code(caller.f_globals.get(code.co_name), code):
            return Found(sys.modules[caller.f_globals["__name__"]], code.co_name)
    return None


def _has_code(value: Any, code: types.CodeType) -> bool:
    is_function = isinstance(value, types.FunctionType)
    return is_function and inspect.unwrap(value).__code__ is code


@contextmanager
def watched_functions(functions: Collection[Found], on_call: OnCall) -> Iterator[None]:
    """Have calls of some functions go to `on_call`, until exit."""
    with ExitStack() as stack:
        for found in functions:
            value = found.holder.__dict__[found.name]
            stack.enter_context(patched(found.holder, found.name, _watched(value, on_call)))
        yield


def _watched(function: Callable[..., object], on_call: OnCall) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return on_call(function, args, kwargs)

    return call
