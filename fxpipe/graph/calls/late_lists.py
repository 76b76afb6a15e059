"""Lists whose length is a size: made when somebody looks at them, and not before.

`torch.split(x, lengths.tolist())` has as many parts as there are images, so to look at the list
fixes the number of rows. Vision-language models often make such a list and put it together again,
`torch.cat(parts)`, and look at nothing in between. A trace hands out a `Numbers` for the lengths
and `Parts` for what they split; `rejoined` is what is written if these meet `torch.cat` unread.
What a whole call returns may be such a list too: a `Many`. Its sizes are known for the example and
for more rows, so those of `torch.cat(many)` are formulas.
Whatever else is done with them makes a plain list or tuple first, as if it had been one always.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.graph.nested import Args, Kwargs, Size, branch, is_atom
from fxpipe.graph.sandbox.made_up import another
from fxpipe.graph.sandbox.patches import patched
from fxpipe.torch_inside import FakeTensor

__all__ = [
    "LateList",
    "Many",
    "ManySpec",
    "Numbers",
    "Parts",
    "joined_late",
    "joined_many",
    "merged_runs",
    "plain_lists",
    "rejoined",
    "split_late",
    "watched_lists",
]

_OWN = {
    "__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__",
    "__init_subclass__", "__subclasshook__", "__dir__", "__class_getitem__", "__getstate__",
}  # fmt: skip


class LateList:
    """What a list and a tuple have in common that are made when they are looked at."""

    is_atom = True  # see `nested`

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._made: object = None

    def plain(self) -> object:
        """Return the list or tuple, the same one each time."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def made(self) -> object:
        """The list or tuple, if somebody has looked at it."""
        return self._made

    def __radd__(self, other: Any) -> object:
        return other + self.plain()  # a list to the left would take what is in memory


class Numbers(LateList, list[int]):
    """The values of a tensor of whole numbers."""

    def __init__(self, tensor: torch.Tensor, make: Callable[[], object]) -> None:
        super().__init__(make)
        self.tensor = tensor


class Parts(LateList, tuple[torch.Tensor, ...]):
    """The parts of a tensor, split by `Numbers`."""

    def __new__(cls, *_: object) -> Parts:
        return super().__new__(cls)

    def __init__(
        self, tensor: torch.Tensor, sizes: Numbers, dim: int, make: Callable[[], object]
    ) -> None:
        super().__init__(make)
        self.tensor, self.sizes, self.dim = tensor, sizes, dim


@dataclasses.dataclass(frozen=True, slots=True)
class ManySpec:
    """In place of a spec: a list of tensors whose length is a size. It crosses no boundary."""

    is_atom: ClassVar[bool] = True


class Many(LateList):
    """Tensors that a call returns, more of them where there are more rows.

    `runs` are those of the example, and of more rows; `formula` is that of `merged_runs`.
    """

    def __init__(
        self, runs: Sequence[Sequence[torch.Tensor]], formula: Callable[[Sequence[int]], Size]
    ) -> None:
        super().__init__(self._early)
        self.runs, self._formula = runs, formula
        self.node: Callable[[], fx.Node]

    def _early(self) -> object:
        raise ValueError("looked at too early")

    def found_at(self, node: Callable[[], fx.Node], make: Callable[[], object]) -> None:
        """Say which node has these, and how to make a plain list of them."""
        self.node, self._make = node, make

    def joined(self, dim: int) -> torch.Tensor:
        """Return what `torch.cat` makes of these, without data."""
        shapes = []
        for run in self.runs:
            shapes.append(list(run[0].shape))
            shapes[-1][dim] = sum(tensor.shape[dim] for tensor in run)
        like = next((tensor for tensor in self.runs[0] if tensor.requires_grad), self.runs[0][0])
        shape = [self._formula(sizes) for sizes in zip(*shapes, strict=True)]
        made: torch.Tensor = another(like, shape)
        return made


class ManyList(Many, list[torch.Tensor]):
    """A list of tensors."""


class ManyTuple(Many, tuple[torch.Tensor, ...]):
    """A tuple of tensors."""

    def __new__(cls, *_: object) -> ManyTuple:
        return super().__new__(cls)


def merged_runs(runs: Sequence[Any], formula: Callable[[Sequence[int]], Size]) -> Any:
    """Return what a function has returned several times, as one value without data.

    `runs` are for more and more rows; `formula` turns a size in each into one for any number.

    Raises:
        ValueError: they differ in more than sizes and lengths.
    """
    first = runs[0]
    if len({type(run) for run in runs}) > 1:
        raise ValueError("not always of the same kind")
    if isinstance(first, torch.Tensor):
        if len({(run.dim(), run.dtype, run.requires_grad) for run in runs}) > 1:
            raise ValueError("not always of the same kind")
        shapes = zip(*(run.shape for run in runs), strict=True)
        return another(first, [formula(sizes) for sizes in shapes])
    if type(first) in (list, tuple) and len({len(run) for run in runs}) > 1:
        if not all(run and all(isinstance(t, torch.Tensor) for t in run) for run in runs):
            raise ValueError("a list that is longer for more rows holds more than tensors")
        if len({(tensor.dim(), tensor.dtype) for run in runs for tensor in run}) > 1:
            raise ValueError("a list that is longer for more rows holds tensors of several kinds")
        return (ManyList if type(first) is list else ManyTuple)(runs, formula)
    found = [branch(run) for run in runs]
    if found[0] is None:
        if is_atom(first) and any(run != first for run in runs):
            raise ValueError("a number depends on the rows")
        return first
    if any(one is None or one.accessors != found[0].accessors for one in found):
        raise ValueError("not always of the same form")
    children = zip(*(one.children for one in found if one is not None), strict=True)
    return found[0].make(tuple(merged_runs(child, formula) for child in children))


def joined_many(func: object, args: Args, kwargs: Kwargs) -> tuple[Many, int] | None:
    """Return what a call joins, and along which dimension, if nobody has looked at the list."""
    if func not in (torch.cat, torch.concat, torch.concatenate):
        return None
    given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    many, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(many, Many) or many._made is not None:
        return None
    return (many, dim) if type(dim) is int and len(given) <= 2 else None


def _looking(name: str) -> Callable[..., object]:
    def method(self: LateList, *args: object, **kwargs: object) -> object:
        return getattr(self.plain(), name)(*args, **kwargs)

    return method


for _kind, _base in ((Numbers, list), (ManyList, list), (Parts, tuple), (ManyTuple, tuple)):
    for _name in {*dir(_base), "__hash__"} - _OWN:
        if callable(getattr(_base, _name)):
            setattr(_kind, _name, _looking(_name))


@contextmanager
def watched_lists(
    on_list: Callable[[torch.Tensor, Callable[[], object]], object],
) -> Iterator[None]:
    """Have `tolist()` of fake tensors ask `on_list`, until exit."""
    original = FakeTensor.tolist

    def tolist(self: FakeTensor) -> object:
        return on_list(self, lambda: original(self))

    with patched(FakeTensor, "tolist", tolist):
        yield


def plain_lists(value: Any) -> Any:
    """Return arguments with plain lists in place of late ones.

    A list without any is the same object: a callee may put something in.
    """
    if isinstance(value, LateList):
        return value.plain()
    if type(value) not in (tuple, list, dict):
        return value
    parts = list(value.values() if type(value) is dict else value)
    made = list(map(plain_lists, parts))
    if all(map(operator.is_, made, parts)):
        return value
    return dict(zip(value, made, strict=True)) if type(value) is dict else type(value)(made)


def split_late(func: object, args: Any, kwargs: Any, split: Callable[..., object]) -> Parts | None:
    """Return the parts of a tensor that numbers split which nobody has looked at."""
    if getattr(func, "__name__", "") not in ("split", "split_with_sizes"):
        return None
    given = dict(zip(("tensor", "sizes", "dim"), args, strict=False))
    others = {_SPELLED.get(name, name): value for name, value in kwargs.items()}
    tensor, sizes = (given | others).get("tensor"), (given | others).get("sizes")
    if not isinstance(sizes, Numbers) or sizes._made is not None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return None
    dim = (given | others).get("dim", 0)
    return Parts(tensor, sizes, dim % tensor.dim(), lambda: split(tensor, sizes.plain(), dim))


_SPELLED = {"split_size": "sizes", "split_sizes": "sizes", "split_size_or_sections": "sizes"}


def joined_late(func: object, args: Args, kwargs: Kwargs) -> tuple[object, ...] | None:
    """Return the arguments of `rejoined` if a call puts parts together that nobody has seen."""
    if func not in (torch.cat, torch.concat, torch.concatenate):
        return None
    given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    parts, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(parts, Parts) or parts._made is not None or type(dim) is not int:
        return None
    if len(given) > 2 or dim % parts.tensor.dim() != parts.dim:
        return None
    return parts.tensor, parts.sizes.tensor, parts.dim


def rejoined(x: torch.Tensor, sizes: torch.Tensor, dim: int) -> torch.Tensor:
    """Split a tensor into parts of these sizes and put them together again."""
    if x.is_meta or isinstance(x, FakeTensor):
        return x.clone()
    return torch.cat(torch.split(x, sizes.tolist(), dim), dim)
