"""Are two runs the same? If not, find the first value that a stage computes otherwise.

Values are compared by their bits first; else they must be as close as their dtype can be.
The same operations in the same order give the same bits on a CPU, so most values are
equal outright. NaN equals NaN.

To find who made a difference both models run once more. Of the plain model each call of a
leaf and each torch function of opened code is noted with its line; of the stages each node. A
node is compared with the call of the same function at the same line, counted from the first.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxpipe.graph.facts import Facts
from fxpipe.graph.nested import branch, has_tensor, map_leaves
from fxpipe.graph.source_line import Place, user_frame
from fxpipe.torch_inside import FakeTensor

__all__ = [
    "KERNELS",
    "NOTED",
    "Blamed",
    "Difference",
    "Notes",
    "blame",
    "first_difference",
    "is_same",
    "note_plain",
    "note_stages",
    "noted_differences",
]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_MISSING = object()
KERNELS = "calls of attention kernels"
# What may differ while all values are equal: it is told, but is no error. Draws of Python
# and numpy in opened code are refused where they decide or are used.
NOTED = ("random state of Python", "random state of numpy")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first item in which two runs differ."""

    what: str
    text: str


def first_difference(
    expected: Mapping[str, object], found: Mapping[str, object]
) -> Difference | None:
    """Return the first item that the plain model (`expected`) and the pipe do not share."""
    for what in (*expected, *(name for name in found if name not in expected)):
        if what in NOTED:
            continue
        one, other = expected.get(what, _MISSING), found.get(what, _MISSING)
        if not is_same(one, other):
            return Difference(what, _text(what, one, other))
    return None


def noted_differences(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Return, as text, what differs without any value being another."""
    return [f"{what} after a run" for what in NOTED if expected.get(what) != found.get(what)]


def _kernels_text(one: list[str], other: list[str]) -> str:
    """The first call of a kernel that is not the plain model's."""
    for mine, theirs in itertools.zip_longest(one, other):
        if mine != theirs:
            return f"{KERNELS}: ({mine}) in the plain model, ({theirs}) in the stages"
    return KERNELS


def is_same(one: Any, other: Any) -> bool:
    """Say whether two values are equal, tensors within the tolerance of their dtype."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    parts, others = branch(one), branch(other)
    if parts is not None and others is not None:
        return parts.accessors == others.accessors and all(
            map(is_same, parts.children, others.children)
        )
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    if isinstance(one, (types.FunctionType, types.MethodType)):
        return one.__code__ is other.__code__
    kind: Any = type(one)
    if kind.__eq__ is object.__eq__:
        return True  # two objects of one class, of which nothing more is known
    try:
        return bool(one == other)
    except Exception:
        return True


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        return False  # left behind by a trace
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    tolerance = _TOLERANCE.get(one.dtype if not one.is_complex() else torch.float32)
    if tolerance is None:
        return False
    scale = float(torch.nan_to_num(one.detach().abs().to(torch.float64), posinf=0.0).max())
    return torch.allclose(
        one, other.to(one.device), rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _text(what: str, one: Any, other: Any) -> str:
    if what == KERNELS:
        return _kernels_text(one, other)
    if what.startswith("random state"):
        return f"{what}: the stages do not draw the same random numbers"
    if what.startswith("kind of"):
        kinds = ["nothing" if kind is _MISSING else kind for kind in (one, other)]
        return f"{what}: {kinds[0]} in the plain model, {kinds[1]} in the stages"
    is_pair = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    is_pair &= not (isinstance(one, FakeTensor) or isinstance(other, FakeTensor))
    if is_pair and one.shape == other.shape and one.dtype == other.dtype and one.numel() > 4:
        gap = float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
        return f"{what} differs by up to {gap:.3g}"
    return f"{what}: {_shown(one)} in the plain model, {_shown(other)} in the stages"


def _shown(value: object) -> str:
    if value is _MISSING:
        return "unchanged"
    if isinstance(value, FakeTensor):
        return "a tensor without data"
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{kind} {value.tolist()}" if value.numel() <= 4 else kind
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Blamed:
    """A node of a stage, and the line that made it."""

    stage: int
    node: str
    place: Place | None

    def __str__(self) -> str:
        where = f", made at\n    {self.place}: {self.place.source}" if self.place else ""
        return f"the first value that differs is {self.node!r} of stage {self.stage}{where}"


class Notes:
    """The values of a run by function, line and count."""

    def __init__(self) -> None:
        self.values: dict[Key, object] = {}
        self.blamed: dict[Key, Blamed] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, name: str, line: str, value: object, blamed: Blamed | None = None) -> None:
        count = self._counts.get((name, line), 0)
        self._counts[name, line] = count + 1
        key = (name, line, count)
        self.values[key] = map_leaves(_kept, value)
        if blamed is not None:
            self.blamed[key] = blamed

    def total(self, key: Key) -> int:
        """How often this function was called at this line."""
        return self._counts.get(key[:2], 0)


def blame(plain: Notes, stages: Notes) -> Blamed | None:
    """Return the first node whose value is not that of the plain model."""
    for key, found in stages.blamed.items():
        if plain.total(key) != stages.total(key) or key not in plain.values:
            continue
        if not is_same(plain.values[key], stages.values[key]):
            return found
    return None


def _kept(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def note_plain(notes: Notes, leaves: Mapping[str, nn.Module]) -> Iterator[None]:
    """Note what a run of the plain model computes."""
    watch = _Watch(notes)
    with ExitStack() as stack:
        for name, leaf in leaves.items():
            stack.callback(leaf.register_forward_pre_hook(watch.enter).remove)
            stack.callback(leaf.register_forward_hook(watch.leave(name), always_call=True).remove)
        stack.enter_context(watch)
        yield


class _Watch(TorchFunctionMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes
        self._depth = 0

    def enter(self, *_: object) -> None:
        self._depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            self._depth -= 1
            if not self._depth:
                self._notes.add(name, "", output)

        return hook

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = _plain_name(getattr(func, "__name__", ""))
        if not self._depth and name and has_tensor(result):
            self._notes.add(name, str(user_frame()), result)
        return result


def note_stages(
    notes: Notes, modules: Sequence[fx.GraphModule], facts: Sequence[Facts]
) -> list[Callable[..., object]]:
    """Return the stages as callables that note what each node computes."""
    return [
        _Noting(module, index, notes, known).run
        for index, (module, known) in enumerate(zip(modules, facts, strict=True))
    ]


class _Noting(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, stage: int, notes: Notes, facts: Facts) -> None:
        super().__init__(module)
        self._stage, self._notes, self._facts = stage, notes, facts
        self._names = [n.target for n in module.graph.nodes if n.op == "placeholder"]

    def run(self, *args: object, **kwargs: object) -> object:
        values = dict(zip(self._names, args, strict=False))
        return super().run(*(({**values, **kwargs})[name] for name in self._names))

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        if node.op in ("call_module", "call_function", "call_method") and has_tensor(result):
            name, is_leaf = _target_name(node)
            place = self._facts[node].where
            line = "" if is_leaf or place is None else str(place)
            self._notes.add(name, line, result, Blamed(self._stage, node.name, place))
        return result


def _target_name(node: fx.Node) -> tuple[str, bool]:
    """The name of what a node calls, and whether that is a leaf."""
    if node.op == "call_module":
        return str(node.target), True
    target: Any = node.target
    args = list(node.args)
    while hasattr(target, "_target"):
        if hasattr(target, "_training"):
            args = args[1:]
        target = target._target
    if target is None and args and isinstance(args[0], fx.Node):
        return str(args[0].target), True
    return _plain_name(
        target if isinstance(target, str) else getattr(target, "__name__", "")
    ), False


def _plain_name(name: str) -> str:
    name = name.strip("_")
    return name[1:] if name in ("radd", "rmul", "rsub", "rtruediv", "rpow", "rmatmul") else name
