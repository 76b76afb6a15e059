"""Find the parts of a stage: its module calls, alike ones in a row taken together.

In:  the fx module of a stage.
Out: `StageParts`: the parts in order of execution, what each reads, and which part makes
     or reads a value that crosses the stage's boundary.

Nodes that call no module (sums, masks, sizes) belong to no part; a value that runs
through them counts as coming from the parts before them. Where a stage was opened down
to operations, those of one module are a part.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from fxpipe.graph.cut.stage_writer import Within
from fxpipe.graph.facts import Facts
from fxpipe.graph.interface import TensorSpec
from fxpipe.text import count_text
from fxpipe.torch_inside import children_of

__all__ = ["Part", "StageParts", "find_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """Something inside a stage.

    `names` are the modules (or the node) it stands for, in order; `reads` are indices of
    other parts of the stage.
    """

    names: tuple[str, ...]
    kind: str
    parameters: int
    reads: tuple[int, ...] = ()
    spec: str = ""

    @property
    def title(self) -> str:
        """Such as "layers.8" or "layers.8 … layers.15"."""
        if len(self.names) == 1:
            return self.names[0]
        if len(set(self.names)) == 1:
            return f"{self.names[0]}, {len(self.names)} times"
        return f"{self.names[0]} … {self.names[-1]}"

    @property
    def kind_text(self) -> str:
        """Such as "Block" or "8 × Block"."""
        return self.kind if len(self.names) == 1 else f"{len(self.names)} × {self.kind}"

    @property
    def note(self) -> str:
        """Such as "8 × Block · 12.4 k"; at depth "nodes" with what it makes."""
        count = count_text(self.parameters) if self.parameters else ""
        return " · ".join(text for text in (self.kind_text, self.spec, count) if text)


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parts of a stage, and where values enter and leave them."""

    parts: tuple[Part, ...]
    _sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _readers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _titles: dict[str, str] = field(default_factory=dict)

    def source_of(self, value: str) -> int | None:
        """The part that makes a value, by the name of its node; None if it is code."""
        sources = self._sources.get(value, ())
        return max(sources) if sources else None

    def title_of(self, value: str) -> str:
        """What people call a value, by the name of its node: down.0[1], blocks.2: add."""
        return self._titles.get(value, value)

    def readers_of(self, value: str) -> tuple[int, ...]:
        """The parts that read a value which the stage receives."""
        return self._readers.get(value, ())

    def holder_of(self, parameter: str) -> int | None:
        """The part whose module holds a parameter."""
        for index, part in enumerate(self.parts):
            if any(parameter.startswith(f"{name}.") for name in part.names):
                return index
        return None


def find_parts(
    module: fx.GraphModule, facts: Facts, sizes: Mapping[str, int], *, shortest_run: int | None
) -> StageParts:
    """Find the parts of a stage.

    Runs of at least `shortest_run` alike modules become one part; None makes every node a
    part of its own, which says what it makes at these `sizes`.
    """
    titles = _titles(module, facts)
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if shortest_run is None:
        owners = {node: index for index, node in enumerate(nodes) if not _is_plumbing(node, facts)}
        parts = [_node_part(module, facts, node, titles[node.name], sizes) for node in owners]
        owners = {node: index for index, node in enumerate(owners)}
    else:
        parts, owners = _module_parts(module, facts, nodes)
        parts, owners = _join_runs(parts, owners, shortest_run)
    connected = _connect(module, parts, owners)
    return replace(connected, _titles=titles)


def _titles(module: fx.GraphModule, facts: Facts) -> dict[str, str]:
    """For each node the module whose value it is, or whose code and which operation."""
    titles: dict[str, str] = {}
    counts: dict[str, int] = {}
    for node in module.graph.nodes:
        called = _called_module(module, node)
        source = node.args[0] if node.args else None
        if called is not None:
            title = called[0]
        elif node.op == "placeholder":
            title = node.name
        elif node.target is operator.getitem and isinstance(source, fx.Node):
            title = f"{titles[source.name]}[{_index_text(node.args[1])}]"
        else:
            what = str(getattr(node.target, "__name__", node.target)).rstrip("_")
            title = f"{facts[node].owner}: {what}" if facts[node].owner else what
        counts[title] = counts.get(title, 0) + 1
        titles[node.name] = title if counts[title] == 1 else f"{title} ({counts[title]})"
    return titles


def _index_text(index: Any) -> str:
    """What stands between the brackets in Python: `:, None, 1:3`."""
    if isinstance(index, slice):
        ends = ["" if end is None else _index_text(end) for end in (index.start, index.stop)]
        step = "" if index.step is None else f":{_index_text(index.step)}"
        return ":".join(ends) + step
    if isinstance(index, tuple):
        return ", ".join(map(_index_text, index))
    return "..." if index is Ellipsis else repr(index)


def _node_part(
    module: fx.GraphModule, facts: Facts, node: fx.Node, title: str, sizes: Mapping[str, int]
) -> Part:
    spec = facts[node].spec
    if isinstance(spec, TensorSpec) and spec.symbols <= set(sizes):
        spec = spec.bind(sizes)
    made = str(spec) if isinstance(spec, TensorSpec) else ""
    called = _called_module(module, node)
    if called is None:
        return Part((title,), "", 0, spec=made)
    return Part((called[0],), type(called[1]).__name__, _num_parameters(called[1]), spec=made)


def _module_parts(
    module: fx.GraphModule, facts: Facts, nodes: Iterable[fx.Node]
) -> tuple[list[Part], dict[fx.Node, int]]:
    """A part for each module call, and for the operations of each module that was opened."""
    parts: list[Part] = []
    owners: dict[fx.Node, int] = {}
    calls = {node: _called_module(module, node) for node in nodes}
    called = {found[0] for found in calls.values() if found is not None}
    for node, found in calls.items():
        if found is not None:
            name, inner = found
            owners[node] = len(parts)
            parts.append(Part((name,), type(inner).__name__, _num_parameters(inner)))
            continue
        owner = _block_of(facts[node].owner)
        # Code of a module that contains called modules is what is between them.
        if not owner or any(name.startswith(f"{owner}.") for name in called):
            continue
        if _is_plumbing(node, facts):
            continue
        if not parts or parts[-1].names != (owner,):
            held = _held(module, owner)
            parts.append(Part((owner,), "operations", _num_parameters(held) if held else 0))
        owners[node] = len(parts) - 1
    return parts, owners


def _block_of(owner: str) -> str:
    """The block around an opened module: layers.3 of layers.3.norm, head of head.linear."""
    words = owner.split(".")
    for index, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: index + 1])
    return words[0]


def _called_module(module: fx.GraphModule, node: fx.Node) -> tuple[str, nn.Module] | None:
    """The module that a node calls, also if it is called under settings such as no_grad."""
    target: Any = node.target
    if isinstance(target, Within) and node.args and isinstance(node.args[0], fx.Node):
        first = node.args[0]
        target = first.target if first.op == "get_attr" else None
    elif node.op != "call_module":
        return None
    found = _held(module, target) if isinstance(target, str) else None
    return None if found is None else (target, found)


def _held(module: nn.Module, name: str) -> nn.Module | None:
    for word in name.split("."):
        inner = children_of(module).get(word)
        if inner is None:
            return None
        module = inner
    return module


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_plumbing(node: fx.Node, facts: Facts) -> bool:
    """Whether a node only fetches or takes apart a value, or asks for its size or device."""
    if node.op == "call_function" and node.target is operator.getitem:
        return facts[node].is_part
    return node.op == "get_attr" or _is_question(node)


def _is_question(node: fx.Node) -> bool:
    """Whether a node asks for a size, a device or a dtype: no data flows through it."""
    if node.op == "call_function":
        return getattr(node.target, "__name__", "") in ("device_of", "like")
    return node.op == "call_method" and node.target == "size"


def _join_runs(
    parts: list[Part], owners: dict[fx.Node, int], shortest: int
) -> tuple[list[Part], dict[fx.Node, int]]:
    """Take runs of alike parts together: the same class, numbered one after the other."""
    runs: list[list[int]] = []
    for index, part in enumerate(parts):
        if runs and _follows(parts[runs[-1][-1]], part):
            runs[-1].append(index)
        else:
            runs.append([index])
    runs = [
        piece
        for run in runs
        for piece in ([run] if len(run) >= shortest else [[index] for index in run])
    ]
    joined: list[Part] = []
    moved: dict[int, int] = {}
    for run in runs:
        moved.update(dict.fromkeys(run, len(joined)))
        names = tuple(name for index in run for name in parts[index].names)
        total = sum({parts[index].names: parts[index].parameters for index in run}.values())
        joined.append(replace(parts[run[0]], names=names, parameters=total))
    return joined, {node: moved[index] for node, index in owners.items()}


def _follows(before: Part, after: Part) -> bool:
    if before.kind != after.kind:
        return False
    if before.names[-1] == after.names[0]:
        return True
    stem, _, number = before.names[-1].rpartition(".")
    next_stem, _, next_number = after.names[0].rpartition(".")
    return (
        stem == next_stem
        and number.isdigit()
        and next_number.isdigit()
        and int(next_number) == int(number) + 1
    )


def _connect(module: fx.GraphModule, parts: list[Part], owners: dict[fx.Node, int]) -> StageParts:
    """Follow values from part to part, through the nodes that belong to none."""
    sources: dict[fx.Node, frozenset[int]] = {}
    entered: dict[fx.Node, frozenset[str]] = {}
    reads: list[set[int]] = [set() for _ in parts]
    readers: dict[str, set[int]] = {}
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        below = frozenset[int]().union(*(sources[i] for i in inputs))
        received = frozenset[str]().union(*(entered[i] for i in inputs))
        if node.op == "placeholder":
            sources[node], entered[node] = frozenset(), frozenset({node.name})
        elif node in owners:
            index = owners[node]
            reads[index] |= below - {index}
            for name in received:
                readers.setdefault(name, set()).add(index)
            sources[node], entered[node] = frozenset({index}), frozenset()
        elif _is_question(node):
            sources[node], entered[node] = frozenset(), frozenset()
        else:
            sources[node], entered[node] = below, received
    connected = tuple(
        replace(part, reads=tuple(sorted(read))) for part, read in zip(parts, reads, strict=True)
    )
    made = {node.name: tuple(sorted(found)) for node, found in sources.items()}
    return StageParts(
        connected, made, {name: tuple(sorted(found)) for name, found in readers.items()}
    )
