"""Checks that a stage makes while it runs: are the inputs like those of the trace?

Where opened code looked at values of the model's inputs, the graph holds what it
did for the example. These callables compare; other inputs are refused, by name of
the line that would go another way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxpipe.errors import InputError
from fxpipe.graph.nested import walk
from fxpipe.graph.source_line import Place

__all__ = ["Agreed", "AgreedSizes"]


class Agreed:
    """A callable that asks a function again and compares with the traced answer."""

    def __init__(self, func: Any, place: Place) -> None:
        self._func = func
        self._place = place
        self.__name__ = self.__qualname__ = f"agreed_{getattr(func, '__name__', 'value')}"
        self.__module__ = __name__

    def __call__(self, expected: Any, *args: Any, **kwargs: Any) -> None:
        if _has_no_values((args, kwargs)):
            return
        found = self._func(*args, **kwargs)
        if not _is_same(expected, found):
            raise InputError(
                f"the model looks at values of its inputs and was traced where\n  {self._place}: "
                f"{self._place.source}\ngave {expected!r}; these inputs give {found!r}, so it "
                f"would do something else\n{_ADVICE}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreed:
        return self


class AgreedSizes:
    """A callable that compares the sizes of tensors with those that were traced."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.__name__ = self.__qualname__ = "agreed_sizes"
        self.__module__ = __name__

    def __call__(self, output: Any, expected: Any) -> None:
        if _has_no_values(output):
            return
        found = [list(leaf.shape) for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        if found != [list(shape) for shape in expected]:
            raise InputError(
                "a size depends on values of the inputs, and later stages rely on how it was "
                f"traced:\n  {self._place}: {self._place.source}\nshould be of size "
                f"{_text(expected)}, and is of size {_text(found)}\n{_ADVICE}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> AgreedSizes:
        return self


_ADVICE = (
    "trace with inputs like these, or move the splits so that this code is inside a submodule "
    "that is not split"
)


def _has_no_values(value: Any) -> bool:
    tensors = [leaf for _, leaf in walk(value) if isinstance(leaf, torch.Tensor)]
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def _is_same(expected: Any, found: Any) -> bool:
    try:
        return bool(expected == found)
    except ValueError:  # arrays
        return bool((expected == found).all())


def _text(shapes: Any) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
