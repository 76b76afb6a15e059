"""What a stage compares with the trace in each run, and refuses if it differs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from typing import Any

import torch

from fxpipe.errors import InputError, TraceError
from fxpipe.graph.calls.graph_calls import GraphCall, given, has_no_values
from fxpipe.graph.dims import Dim, evaluate
from fxpipe.graph.nested import SYMBOLIC, walk
from fxpipe.graph.source_line import Place

__all__ = [
    "Agreed",
    "AgreedDtype",
    "AgreedGradient",
    "AgreedLeaf",
    "AgreedPart",
    "AgreedSizes",
    "Asserted",
    "Compared",
    "ItemIs",
]

_ADVICE = (
    "trace with inputs like these, or move the splits so that this code is inside a submodule "
    "that is not split"
)


class Check(GraphCall):
    """A callable that compares something with what was traced at a line of the user's code."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name)
        self._at = f"\n  {place}: {place.source}\n"


class Agreed(Check):
    """A callable that asks a function again and compares with the traced answer.

    Where opened code looked at values of the model's inputs, the graph holds what it did
    for the example. Other inputs are refused, by the line that would go another way.
    """

    def __init__(self, func: Callable[..., object], place: Place) -> None:
        super().__init__(f"agreed_{getattr(func, '__name__', 'value')}", place)
        self._func = func

    def __call__(self, expected: object, *args: object, **kwargs: object) -> None:
        if has_no_values((args, kwargs)):
            return
        found = self._func(*args, **kwargs)
        if not _is_same(expected, found):
            raise InputError(
                f"the model looks at values of its inputs and was traced where{self._at}"
                f"gave {expected!r}; these inputs give {found!r}, so it would do something else\n"
                f"{_ADVICE}"
            )


class Compared:
    """A number that code compares with one other: what it decides by is the answer.

    `on_answer` is told what was asked, what the other side was, and the answer; `on_value` that
    the number itself is needed, since the other side is none.
    """

    def __init__(
        self,
        value: float,
        on_answer: Callable[[ItemIs, object, bool], None],
        on_value: Callable[[], object],
    ) -> None:
        self._value, self._on_answer, self._on_value = value, on_answer, on_value

    def _ask(self, relation: Callable[[Any, Any], object], other: Any) -> object:
        is_size = isinstance(other, SYMBOLIC) and other.node.has_hint()
        if not is_size and not isinstance(other, (bool, int, float)):
            self._on_value()
            return relation(self._value, other)
        answer = bool(relation(self._value, other.node.hint if is_size else other))
        self._on_answer(ItemIs(relation), other, answer)
        return answer

    __lt__ = partialmethod(_ask, operator.lt)
    __le__ = partialmethod(_ask, operator.le)
    __gt__ = partialmethod(_ask, operator.gt)
    __ge__ = partialmethod(_ask, operator.ge)
    __eq__ = partialmethod(_ask, operator.eq)
    __ne__ = partialmethod(_ask, operator.ne)
    __hash__ = None  # type: ignore[assignment]


class ItemIs:
    """A callable that compares the one value of a tensor with a number."""

    def __init__(self, relation: Callable[[Any, Any], object]) -> None:
        self._relation, self.__name__ = relation, relation.__name__

    def __call__(self, tensor: torch.Tensor, other: float) -> bool:
        return bool(self._relation(tensor.item(), other))


class AgreedPart(Agreed):
    """A callable that compares a number or flag that a leaf returned with the traced one."""

    def __init__(self, place: Place) -> None:
        super().__init__(given, place)


class Asserted(Check):
    """A callable that repeats a check which opened code makes with `torch._check` or the like."""

    def __init__(self, place: Place) -> None:
        super().__init__("asserted", place)

    def __call__(self, condition: object) -> None:
        if not has_no_values(condition) and not bool(torch.as_tensor(condition).all()):
            raise InputError(
                f"the model checks values of its inputs, and finds them wrong:{self._at}"
                "give it inputs that fit together"
            )


class AgreedGradient(Check):
    """A callable that compares whether a tensor requires a gradient with what was traced."""

    def __init__(self, place: Place) -> None:
        super().__init__("agreed_requires_grad", place)

    def __call__(self, expected: bool, value: torch.Tensor) -> None:
        if value.requires_grad is not expected:
            raise TraceError(
                "the model asks whether a tensor requires a gradient, and was traced where"
                f"{self._at}is {expected}; it is {value.requires_grad} now\n"
                "run it as it was traced (parameters frozen or not, "
                "with or without no_grad), or keep this code inside a submodule that is not split"
            )


class AgreedDtype(Check):
    """A callable that compares the dtype of a value that code has looked at with what was traced.

    `known` are the dtypes with which the code does the same.
    """

    def __init__(self, dtype: torch.dtype, place: Place) -> None:
        super().__init__("agreed_dtype", place)
        self.known = frozenset([dtype])

    def __call__(self, value: torch.Tensor | torch.dtype) -> None:
        dtype = value.dtype if isinstance(value, torch.Tensor) else value
        if dtype not in self.known:
            known = " or ".join(sorted(map(str, self.known)))
            raise TraceError(
                "the model looks at the dtype of a value, and was traced where the one in"
                f"{self._at}is {known}; it is {dtype} now\n"
                "trace the model as it is run (under the same autocast, with inputs and parameters "
                "of the same dtype), or keep this code inside a submodule that is not split"
            )


class AgreedSizes(Check):
    """A callable that compares the sizes of tensors with those that were traced."""

    def __init__(self, place: Place) -> None:
        super().__init__("agreed_sizes", place)

    def __call__(self, output: object, expected: Sequence[Any]) -> None:
        if has_no_values(output):
            return
        found = [list(leaf.shape) for _, leaf in walk(output) if isinstance(leaf, torch.Tensor)]
        if found != [list(shape) for shape in expected]:
            raise InputError(
                "a size depends on values of the inputs, and later stages rely on how it "
                f"was traced:{self._at}should be of size {_text(expected)}, and is of size "
                f"{_text(found)}\n{_ADVICE}"
            )


class AgreedLeaf(AgreedSizes):
    """A callable that compares the sizes that a module returns with what its arguments' say."""

    def __init__(
        self,
        place: Place,
        shapes: Sequence[Sequence[Dim]],
        sources: Mapping[str, tuple[int, int]],
    ) -> None:
        super().__init__(place)
        self._shapes, self._dims = shapes, {name: dim for name, (_, dim) in sources.items()}

    def __call__(self, output: object, inputs: Sequence[torch.Tensor | int]) -> None:
        values = {
            name: int(value.shape[dim]) if isinstance(value, torch.Tensor) else value
            for (name, dim), value in zip(self._dims.items(), inputs, strict=True)
        }
        super().__call__(
            output, [[evaluate(size, values) for size in shape] for shape in self._shapes]
        )


def _is_same(expected: object, found: Any) -> bool:
    try:
        return bool(expected == found)
    except ValueError:  # arrays
        return bool((expected == found).all())


def _text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
