"""Lists whose length is a size: made when somebody looks at them, and not before.

`torch.split(x, lengths.tolist())` has as many parts as there are images, so to look at the list
fixes the number of rows. Vision-language models often make such a list and put it together again,
`torch.cat(parts)`, and look at nothing in between. A trace hands out a `Numbers` for the lengths
and `Parts` for what they split; `rejoined` is what is written if these meet `torch.cat` unread.
Whatever else is done with them makes a plain list or tuple first, as if it had been one always.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.graph.nested import Args, Kwargs
from fxpipe.graph.sandbox.patches import patched
from fxpipe.torch_inside import FakeTensor

__all__ = [
    "LateList",
    "Numbers",
    "Parts",
    "joined_late",
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


def _looking(name: str) -> Callable[..., object]:
    def method(self: LateList, *args: object, **kwargs: object) -> object:
        return getattr(self.plain(), name)(*args, **kwargs)

    return method


for _kind, _base in ((Numbers, list), (Parts, tuple)):
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
