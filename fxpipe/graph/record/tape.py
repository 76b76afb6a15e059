"""Write down which operation made which tensor, as an fx graph.

The tape follows tensors by identity: it knows for every live tensor of a trace
the graph node (and the way into that node's output) that holds it. `argument`
turns the arguments of a call into graph arguments; `adopt` takes over what the
call returned.

Some things are only known per stage and stay symbolic in a traced graph:
a size is a sympy expression, `STAGE_DEVICE` is the device the stage runs on.

Mutation is followed too. When an operation changes a tensor, every other live
tensor on the same storage is out of date; its next use is written as "the same
view, taken again after the change", so that a cut between the two stays right.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import TraceError
from fxpipe.graph.calls.graph_calls import (
    ACCESS,
    Constant,
    Fresh,
    Kept,
    Rebuild,
    TensorConstant,
    after,
    overwrite,
)
from fxpipe.graph.calls.late_lists import LateList
from fxpipe.graph.facts import Facts, NodeFacts, new_graph
from fxpipe.graph.nested import (
    SYMBOLIC,
    Accessor,
    branch,
    contents,
    copied,
    mutable_parts,
    snapshot,
    walk,
)
from fxpipe.graph.record.constant_values import Draw
from fxpipe.graph.source_line import an_effect, user_frame
from fxpipe.torch_inside import FakeTensor, memory_of

__all__ = [
    "STAGE_DEVICE",
    "Constant",
    "Rebuild",
    "StageDevice",
    "Tape",
    "UnknownTensorError",
]


class StageDevice:
    """Stands in a traced graph for the device that the stage will run on."""

    def __repr__(self) -> str:
        return "stage_device"

    def __copy__(self) -> StageDevice:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> StageDevice:
        return self


STAGE_DEVICE = StageDevice()


class UnknownTensorError(Exception):
    """A tensor that no recorded operation made."""


@dataclasses.dataclass(slots=True)
class _Held:
    """Where a tensor is, how many changes of its storage it has seen, what it is a view of."""

    node: fx.Node
    path: tuple[Accessor, ...]
    tensor: torch.Tensor
    seen: int
    base: torch.Tensor | None = None
    base_node: fx.Node | None = None
    resolved: fx.Node | None = None


class Tape:
    """The graph of a trace under construction."""

    def __init__(
        self,
        state_name: Callable[[torch.Tensor], str | None],
        real_of: Mapping[int, torch.Tensor],
    ) -> None:
        self.graph = new_graph()
        self.facts = Facts()
        self.values: dict[fx.Node, Any] = {}  # with the tensors of the trace itself
        self._state_name = state_name
        self._real_of = real_of
        self._held: dict[int, _Held] = {}
        self._objects: dict[int, tuple[object, fx.Node, tuple[Accessor, ...], object]] = {}
        self._accessed: dict[tuple[fx.Node, tuple[Accessor, ...]], fx.Node] = {}
        self._state: dict[str, fx.Node] = {}
        self._state_storages: dict[int, str] = {}
        self._changes: dict[int, list[fx.Node]] = {}
        self._constants: list[tuple[fx.Node, object, object, object]] = []
        self._storages: list[tuple[fx.Node, tuple[Accessor, ...], int, bool]] = []
        self.generators: frozenset[int] = frozenset()  # those that modules keep
        self.trace_devices: frozenset[torch.device] = frozenset()
        self.describe: Callable[[], NodeFacts] = NodeFacts

    # -- from Python values to graph arguments

    def argument(self, value: object) -> Any:
        """Return a value as a graph argument, writing nodes where needed.

        Raises:
            UnknownTensorError: it holds a tensor that no recorded operation made.
        """
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, SYMBOLIC):
            return symbolic(value)
        if isinstance(value, LateList):
            return self.argument(value.plain())
        if isinstance(value, torch.device):
            return STAGE_DEVICE if value in self.trace_devices else value
        if isinstance(value, slice):
            return slice(*(self.argument(v) for v in (value.start, value.stop, value.step)))
        known = self._known_object(value)
        if known is not None:
            return known
        found = branch(value)
        if found is None:
            return self._constant(value)
        children = tuple(self.argument(child) for child in found.children)
        if found.is_plain:
            return found.make(children)
        node = self.write("call_function", Rebuild(type(value), found.make), children, {})
        self.values[node] = snapshot(value)
        self._know_object(value, node, ())
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that holds a tensor, as of now."""
        held = self._held.get(id(tensor))
        if held is not None:
            return self._current(held)
        name = self._state_name(tensor)
        if name is not None:
            return self._state_node(name, tensor)
        real = self._real_of.get(id(tensor), tensor)
        if isinstance(real, FakeTensor):
            raise UnknownTensorError
        node = self.write("call_function", TensorConstant(real), (STAGE_DEVICE,), {})
        self.adopt(node, tensor)
        return node

    def knows(self, tensor: torch.Tensor) -> bool:
        """Say whether a recorded operation made this tensor."""
        return id(tensor) in self._held

    def depends_on_data(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor follows from more than constants and sizes."""
        held = self._held.get(id(tensor))
        if held is None:
            return isinstance(tensor, FakeTensor) and id(tensor) not in self._real_of
        stack, seen = [held.node], {held.node}
        while stack:
            node = stack.pop()
            if node.op not in ("call_function", "call_method") or self.facts[node].draws:
                return True
            fresh = [source for source in node.all_input_nodes if source not in seen]
            seen.update(fresh)
            stack += fresh
        return False

    def _state_node(self, name: str, tensor: torch.Tensor) -> fx.Node:
        if name not in self._state:
            node = self.write("get_attr", name, (), {})
            self.values[node] = tensor
            self._state[name] = node
            self._state_storages[_storage(tensor)] = name
        return self._state[name]

    def overwrite(self, name: str, owner: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """Write that a buffer gets the value of another tensor, at the end of a run."""
        value = self.node_of(new)
        if value.op == "get_attr":
            value = self._copied(value)
        if name in self._state:
            self._copied(self._state[name])
        last = (
            next(reversed(self.graph.nodes))
            if value.op == "placeholder"
            else self.facts.last_part(value)
        )
        if name not in self._state:
            with self.graph.inserting_after(last):
                last = self._state_node(name, old)
        with self.graph.inserting_after(last):
            node = self.write("call_function", overwrite, (self._state[name], value), {})
        self.facts.learn(node, owner=owner, writes=frozenset({name}))

    def keep(self, holder: object, key: object, value: object, *, refills: bool = False) -> None:
        """Write that a value is left in a module, object or dict.

        A tensor is left there right behind what made it; nothing is written of one that no
        recorded operation made.
        """
        if not isinstance(value, torch.Tensor):
            tensors = [leaf for _, leaf in walk(value) if isinstance(leaf, torch.Tensor)]
            if all(map(self.knows, tensors)):
                kept = Kept(holder, key, refills=refills)
                self.write("call_function", kept, (self.argument(value),), {})
            return
        node = self.node_of(value) if self.knows(value) else None
        if node is not None and node.op not in ("placeholder", "get_attr"):
            with self.graph.inserting_after(self.facts.last_part(node)):
                self.write("call_function", Kept(holder, key), (node,), {})

    def _copied(self, state: fx.Node) -> fx.Node:
        """Have the readers of a parameter or buffer read a copy; return it."""
        readers = [user for user in state.users if user.target is not overwrite]
        with self.graph.inserting_after(state):
            copied = self.write("call_function", torch.clone, (state,), {})
        self.values[copied] = self.values[state]
        for reader in readers:
            reader.replace_input_with(state, copied)
        return copied

    def _constant(self, value: Any) -> object:
        if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
            return value.item()  # a numpy number: graph code has no numpy
        if isinstance(value, Draw):
            value.report()
            return float(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, WRITABLE) or (
            isinstance(value, type) and value.__module__ == "builtins"
        ):
            return value
        if isinstance(value, Iterator) or _holds_fake(value):
            raise TraceError(an_effect(f"a {type(value).__name__} as argument", user_frame()))
        made_here = isinstance(value, torch.Generator) and id(value) not in self.generators
        if made_here:
            raise TraceError(an_effect("a torch.Generator of its own", user_frame()))
        node = self.write("call_function", Constant(value), (), {})
        self.values[node] = value
        if any(True for _ in mutable_parts(value)):
            self._constants.append((node, value, copied(value), contents(value)))
            self._know_object(value, node, ())
        return node

    def _know_object(self, value: object, node: fx.Node, path: tuple[Accessor, ...]) -> None:
        self._objects[id(value)] = (value, node, path, contents(value))

    def _known_object(self, value: object) -> fx.Node | None:
        known = self._objects.get(id(value))
        if known is None:
            return None
        _, node, path, inside = known
        return self._access(node, path) if contents(value) == inside else None

    def object_changed(self, value: object, before: fx.Node, change: fx.Node) -> None:
        """Remember that a node changed an object (not a tensor) that `before` holds."""
        with self.graph.inserting_after(self.facts.last_part(change)):
            node = self.write("call_function", after, (before, change), {})
        self.adopt(node, value)
        self.values[node] = snapshot(value)
        self._know_object(value, node, ())

    def settle_constants(self) -> None:
        """Have every object that the trace changed be made anew in each run."""
        for node, value, original, inside in self._constants:
            if contents(value) != inside:
                node.target = Fresh(original)

    # -- from results to tracked tensors

    def write(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None
    ) -> fx.Node:
        """Add a node at the end of the graph."""
        node = self.graph.create_node(op, target, args, kwargs, name)
        self.facts[node] = self.describe()
        return node

    def adopt(self, node: fx.Node, output: object, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Remember that the tensors in `output` are what `node` returns.

        `inputs` are the tensors that the output may be a view of; taking the
        view again by running the node again must be harmless.
        """
        self.values[node] = output
        sources = [(_storage(tensor), tensor) for tensor in inputs if self.knows(tensor)]
        for path, leaf in walk(output):
            if not isinstance(leaf, torch.Tensor):
                continue
            held = _Held(node, path, leaf, self._change_count(leaf))
            for storage, base in sources:
                if base is not leaf and storage == _storage(leaf):
                    held.base, held.base_node = base, self._held[id(base)].resolved
            self._held[id(leaf)] = held
            self._note_storage(held)
        self._adopt_objects(node, (), output)

    def _adopt_objects(self, node: fx.Node, path: tuple[Accessor, ...], value: object) -> None:
        found = branch(value)
        if found is None:
            return
        if not found.is_plain:
            self._know_object(value, node, path)
        for accessor, child in zip(found.accessors, found.children, strict=True):
            self._adopt_objects(node, (*path, accessor), child)

    def part_of(self, node: fx.Node, path: tuple[Accessor, ...]) -> fx.Node:
        """Return the node for a part of another node's output."""
        return self._access(node, path)

    def _access(self, node: fx.Node, path: tuple[Accessor, ...]) -> fx.Node:
        """Return the node for a part of another node's output, written right behind it."""
        if not path:
            return node
        key = (node, path)
        if key not in self._accessed:
            owner = self._access(node, path[:-1])
            kind, name = path[-1]
            target: Any = ACCESS[kind]
            with self.graph.inserting_after(self.facts.last_part(owner)):
                made = self.graph.create_node(
                    "call_function", target, (owner, name), {}, f"{owner.name}_{name}"
                )
            self.facts[made] = dataclasses.replace(self.facts[node], is_part=True)
            self.values[made] = _part(self.values[owner], path[-1])
            self._accessed[key] = made
        return self._accessed[key]

    # -- mutation

    def changed(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Remember that a node changed a tensor in place."""
        key = _storage(tensor)
        self._changes.setdefault(key, []).append(node)
        if key in self._state_storages:
            self.facts.learn(node, writes=self.facts[node].writes | {self._state_storages[key]})
        held = self._held.get(id(tensor))
        if held is not None and held.node is node:
            held.seen = len(self._changes[key])

    def _change_count(self, tensor: torch.Tensor) -> int:
        changes = self._changes.get(_storage(tensor)) if self._changes else None
        return len(changes) if changes else 0

    def _current(self, held: _Held) -> fx.Node:
        count = self._change_count(held.tensor)
        if held.seen != count:
            held.seen = count
            if held.base is not None:
                self._view_again(held)
            else:
                last = self._changes[_storage(held.tensor)][-1]
                before = self._access(held.node, held.path)
                with self.graph.inserting_after(self.facts.last_part(last)):
                    held.node = self.write("call_function", after, (before, last), {})
                held.path = ()
                self.values[held.node] = held.tensor
                self._note_storage(held)
        held.resolved = self._access(held.node, held.path)
        return held.resolved

    def _view_again(self, held: _Held) -> None:
        assert held.base is not None
        base = self.node_of(held.base)

        def fresh(node: fx.Node) -> fx.Node:
            return base if node is held.base_node else node

        args = fx.map_arg(held.node.args, fresh)
        kwargs = fx.map_arg(held.node.kwargs, fresh)
        node = self.write(held.node.op, held.node.target, args, kwargs)
        self.values[node] = self.values[held.node]
        held.node, held.base_node = node, base
        self._note_storage(held)

    def _note_storage(self, held: _Held) -> None:
        is_view = held.base is not None
        self._storages.append((held.node, held.path, _storage(held.tensor), is_view))

    def finish(self, output: object) -> None:
        """Write the last node."""
        self.graph.output(self.argument(output))
        self.settle_constants()
        self.mark_mutable()

    def mark_mutable(self) -> None:
        """Mark every node whose value lives on a storage that some node changes."""
        for storage, nodes in self._changes.items():
            for node in nodes:
                self.facts.learn(node, changes=self.facts[node].changes | {storage})
        for node, path, storage, is_view in self._storages:
            found = self._accessed.get((node, path)) if path else node
            if found is not None and storage in self._changes:
                self.facts.learn(found, storage=storage, is_view=is_view)


WRITABLE = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(Ellipsis), bytes,
)  # fmt: skip


def symbolic(value: Any) -> object:
    """Return a symbolic number as a sympy expression, or as a number if it is one."""
    expr = value.node.expr
    if expr.is_number and not expr.free_symbols:
        if isinstance(value, torch.SymInt):
            return int(expr)
        return float(expr) if isinstance(value, torch.SymFloat) else bool(expr)
    return expr


def _holds_fake(value: object, depth: int = 0) -> bool:
    """Say whether a tensor of the trace is inside a value that is taken for a constant."""
    if isinstance(value, FakeTensor):
        return True
    if depth > 3 or isinstance(value, (nn.Module, type, types.ModuleType, str)):
        return False
    inner: list[object] = []
    if isinstance(value, Mapping):
        inner += value.values()
    if isinstance(value, (tuple, list, set, frozenset, ValuesView, ItemsView)):
        inner += value
    if isinstance(value, functools.partial):
        inner += [*value.args, *value.keywords.values()]
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            inner.append(getattr(value, name, None))
    inner += getattr(value, "__dict__", {}).values()
    return any(_holds_fake(part, depth + 1) for part in inner[:200])


def _part(value: object, accessor: Accessor) -> object:
    kind, name = accessor
    return ACCESS[kind](value, name)


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return memory_of(tensor)
