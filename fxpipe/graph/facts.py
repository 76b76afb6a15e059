"""The nodes of a graph: what is known about them, and their arguments.

fx has a dict on every node for what passes know; a typed record in a table of its own says what
there is to know, and a pass cannot leave something behind that nobody expects. The table
goes by the names of the nodes, which copies of a graph keep. Arguments are nested tuples, lists,
dicts and slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import walk
from fxpipe.graph.source_line import Place

__all__ = [
    "Ambient",
    "Facts",
    "NodeFacts",
    "Region",
    "leaves_of",
    "map_arguments",
    "map_pairs",
    "new_graph",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Ambient:
    """Settings that opened code was under when it ran an operation, if not the usual ones."""

    grad: bool | None = None
    autocast: tuple[tuple[Any, ...], ...] = ()


class Region:
    """One `checkpoint()` of the traced run, with its options; regions are told by identity."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.options = dict(options)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known about one node.

    - `spec`: its value, with a `TensorSpec` for each tensor and sizes as expressions
    - `owner`, `where`: the opened module whose code it is, and the line
    - `is_part`: it only takes a part of another node's value
    - `mode`: it runs in training (True) or in evaluation (False) only
    - `ambient`, `regions`: settings and `checkpoint()`s around it, outermost first
    - `dtypes_read`: dtypes that the code read before, and off which node; None for state
    - `untouched`: arguments of a leaf of which it uses size and dtype only
    - `writes`: names of buffers that it changes
    - `storage`, `is_view`: the memory of its value, if some node changes that in place
    - `changes`: the memories that it changes in place
    - `aliases`: it is a leaf whose output shares the memory of an argument
    - `draws`: it takes random numbers from torch's own generator
    """

    spec: Any = None
    owner: str = ""
    where: Place | None = None
    is_part: bool = False
    mode: bool | None = None
    ambient: Ambient = Ambient()
    regions: tuple[Region, ...] = ()
    dtypes_read: Mapping[torch.dtype, fx.Node | None] = dataclasses.field(default_factory=dict)
    untouched: tuple[fx.Node, ...] = ()
    writes: frozenset[str] = frozenset()
    storage: int | None = None
    is_view: bool = False
    changes: frozenset[int] = frozenset()
    aliases: bool = False
    draws: bool = False

    @property
    def origin(self) -> NodeFacts:
        """Only whose code it is: for a node that is made on behalf of this one."""
        return NodeFacts(owner=self.owner, where=self.where)


_NOTHING = NodeFacts()


class Facts:
    """The facts of a graph's nodes; of a node without an entry nothing is known."""

    def __init__(self) -> None:
        self._known: dict[str, NodeFacts] = {}

    def __getitem__(self, node: fx.Node) -> NodeFacts:
        return self._known.get(node.name, _NOTHING)

    def __setitem__(self, node: fx.Node, facts: NodeFacts) -> None:
        self._known[node.name] = facts

    def learn(self, node: fx.Node, **changes: Any) -> None:
        """Replace some of what is known about a node."""
        self._known[node.name] = dataclasses.replace(self[node], **changes)

    def tensors(self, node: fx.Node) -> Iterator[TensorSpec]:
        """Yield the specs of the tensors in a node's value."""
        return (leaf for _, leaf in walk(self[node].spec) if isinstance(leaf, TensorSpec))

    def has_gradient(self, node: fx.Node) -> bool:
        """Say whether a gradient can come back through a node's value."""
        return any(spec.requires_grad for spec in self.tensors(node))

    def last_part(self, node: fx.Node) -> fx.Node:
        """Return the last of the nodes behind this one that only take parts of its value."""
        while node.next.op == "call_function" and self[node.next].is_part:
            node = node.next
        return node

    def part(self, node: fx.Node, key: object) -> fx.Node | None:
        """Return the node that takes one part of another node's value, if there is one."""
        for user in node.users:
            if self[user].is_part and user.args[0] is node and user.args[1:] == (key,):
                return user
        return None


def new_graph() -> fx.Graph:
    """Return an empty graph, none of whose nodes will be called `self`."""
    graph = fx.Graph()
    graph.erase_node(graph.placeholder("self"))
    return graph


def map_arguments(change: Callable[[Any], Any], args: Any) -> Any:
    """Return arguments of the same structure with `change` applied to each leaf."""
    if isinstance(args, (tuple, list)):
        return _sequence(args, [map_arguments(change, part) for part in args])
    if isinstance(args, dict):
        return {key: map_arguments(change, part) for key, part in args.items()}
    if isinstance(args, slice):
        return slice(*(map_arguments(change, p) for p in (args.start, args.stop, args.step)))
    return change(args)


def leaves_of(args: object) -> Iterator[Any]:
    """Yield what is inside arguments, in order."""
    if isinstance(args, (tuple, list)):
        for part in args:
            yield from leaves_of(part)
    elif isinstance(args, dict):
        yield from leaves_of(tuple(args.values()))
    elif isinstance(args, slice):
        yield from leaves_of((args.start, args.stop, args.step))
    else:
        yield args


def map_pairs(join: Callable[[object, object], object], left: object, right: object) -> object:
    """Return arguments made of two that may differ; `join` gets what does not line up."""
    if isinstance(left, (tuple, list)) and type(left) is type(right) and len(left) == len(right):
        parts = [map_pairs(join, a, b) for a, b in zip(left, right, strict=True)]
        return _sequence(left, parts)
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return {key: map_pairs(join, left[key], right[key]) for key in left}
    return join(left, right)


def _sequence(like: Any, parts: list[object]) -> Any:
    # A named tuple takes its fields one by one.
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
