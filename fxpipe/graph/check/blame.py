"""Find the first value that a stage computes otherwise than the plain model.

Both run once more. Of the plain model each call of a leaf and each torch function of
opened code is noted with its line; of the stages each node. A node is compared with the
call of the same function at the same line, counted from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fxpipe.graph.check.compare import is_same
from fxpipe.graph.facts import Facts
from fxpipe.graph.nested import has_tensor, map_leaves
from fxpipe.graph.source_line import Place, user_frame

__all__ = ["Blamed", "Notes", "blame", "note_plain", "note_stages"]

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
        self.values: dict[Key, Any] = {}
        self.blamed: dict[Key, Blamed] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, name: str, line: str, value: Any, blamed: Blamed | None = None) -> None:
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


def _kept(leaf: Any) -> Any:
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

    def enter(self, *_: Any) -> None:
        self._depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1
            if not self._depth:
                self._notes.add(name, "", output)

        return hook

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _plain_name(getattr(func, "__name__", ""))
        if not self._depth and name and has_tensor(result):
            self._notes.add(name, str(user_frame()), result)
        return result


def note_stages(
    notes: Notes, modules: Sequence[fx.GraphModule], facts: Sequence[Facts]
) -> list[Callable[..., Any]]:
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

    def run(self, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self._names, args, strict=False))
        return super().run(*(({**values, **kwargs})[name] for name in self._names))

    def run_node(self, node: fx.Node) -> Any:
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
