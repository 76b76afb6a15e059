"""What every part of a captured model costs, before anything runs.

In:  a `TracedGraph` and the sizes of the traced call.
Out: `GraphCosts`: which node uses which value and parameter, and `at(sizes)`, an `Observation`
     of each node at any sizes: operations, bytes moved, what is kept for the backward.

Equal blocks are observed once per size, so a model of 126 layers costs as much as one of
two. Values are followed through views: two nodes that keep the same storage share it, and a stage
holds it once.

    costs = GraphCosts.of(traced, {"batch": 4})
    costs.flops("forward", {"batch": 8})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.flow import work_nodes
from fxpipe.graph.facts import Facts
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import map_leaves, walk
from fxpipe.graph.record.tape import Rebuild
from fxpipe.planner.cost.node_runs import Bench, Sizes, inputs_of
from fxpipe.planner.cost.observation import Observation, Phase

__all__ = ["GraphCosts", "NodeInfo", "Parameter", "ValueId"]

ValueId = tuple[str, int]
"""A tensor: the node that makes it, and its place among that node's tensors."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor, under the first of its names."""

    name: str
    numel: int
    itemsize: int
    is_trainable: bool
    dims: int = 2

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of several experts, going by its name."""
        return ".experts." in f".{self.name}"

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class NodeInfo:
    """One node: what it reads, makes, and holds.

    `inputs` are in the order of `Observation.keeps_input`; an input of the model is named by
    its placeholder. `is_block` says that the node is a module with parts, which can be
    checkpointed.
    """

    name: str
    module: str
    inputs: tuple[ValueId, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...]
    is_block: bool


@dataclass(frozen=True)
class GraphCosts:
    """The costs of all nodes that a stage has to run, in order.

    `sources[node]` names the nodes that must run before it, also for the sake of a number or
    a structure; `result` lists the values in the model's output; `grows` names the nodes
    whose values get a gradient, `repeatable` those that any stage can compute again.
    """

    nodes: tuple[NodeInfo, ...]
    parameters: Mapping[str, Parameter]
    specs: Mapping[ValueId, TensorSpec]
    sources: Mapping[str, tuple[str, ...]]
    result: tuple[ValueId, ...]
    grows: frozenset[str]
    repeatable: frozenset[str]
    example: Mapping[str, int]
    bench: Bench = field(repr=False)
    kinds: Mapping[str, fx.Node] = field(repr=False)
    _seen: dict[tuple[tuple[str, int], ...], Mapping[str, Observation]] = field(
        default_factory=dict, repr=False
    )
    _bytes: dict[object, float] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(traced: TracedGraph, example: Sizes, *, fused_attention: bool = True) -> GraphCosts:
        """Analyse a captured model.

        Args:
            example: a value for each size symbol of the graph.
            fused_attention: price attention as one kernel that keeps no weights, also with
                dropout, as accelerators have it.
        """
        bench = Bench(traced, fused_attention=fused_attention)
        parameters, name_of = _parameters(traced)
        markers = _Markers(traced.facts)
        work = [node for node in work_nodes(traced) if not traced.facts[node].is_part]
        first: dict[object, fx.Node] = {}
        kinds: dict[str, fx.Node] = {}
        for node in work:
            key = bench.key(node, example)
            kinds[node.name] = node if key is None else first.setdefault(key, node)
        output = next(node for node in traced.graph.nodes if node.op == "output")
        specs = {
            (node.name, place): spec
            for node in traced.graph.nodes
            for place, spec in enumerate(traced.facts.tensors(node))
        }
        return GraphCosts(
            tuple(_info(traced, node, markers, name_of) for node in work),
            parameters,
            specs,
            _sources(work),
            tuple(markers.origin(value) for value in inputs_of(output, traced.facts)),
            frozenset(node.name for node in bench.grows),
            _repeatable(traced, work),
            dict(example),
            bench,
            kinds,
        )

    def at(self, sizes: Sizes) -> Mapping[str, Observation]:
        """What each node does at given sizes; equal nodes share one object."""
        key = tuple(sorted({**self.example, **sizes}.items()))
        if key not in self._seen:
            seen: dict[fx.Node, Observation] = {}
            with self.bench.many():
                for node in self.kinds.values():
                    if node not in seen:
                        seen[node] = self.bench.observe(node, dict(key))
            self._seen[key] = {name: seen[node] for name, node in self.kinds.items()}
        return self._seen[key]

    def flops(self, phase: Phase, sizes: Sizes) -> float:
        """The FLOPs of a phase of the whole model."""
        return sum(seen.flops(phase) for seen in self.at(sizes).values())

    def root(self, value: ValueId) -> ValueId:
        """The value whose storage this one shows; itself unless it is a view."""
        return self._roots.get(value, value)

    @cached_property
    def _roots(self) -> Mapping[ValueId, ValueId]:
        found: dict[ValueId, ValueId] = {}
        seen = self.at(self.example)
        for node in self.nodes:
            for place, source in enumerate(seen[node.name].alias):
                if source is not None and source < len(node.inputs):
                    base = node.inputs[source]
                    found[node.name, place] = found.get(base, base)
        return found

    @cached_property
    def makers(self) -> frozenset[str]:
        """The nodes that make values, as opposed to the model's inputs."""
        return frozenset(node.name for node in self.nodes)

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """For each node the nodes that need it."""
        found: dict[str, list[str]] = {}
        for name, sources in self.sources.items():
            for source in sources:
                found.setdefault(source, []).append(name)
        return {name: tuple(users) for name, users in found.items()}

    def is_repeatable(self, node: str) -> bool:
        """Whether stages compute a value again rather than receive it."""
        return node in self.repeatable

    def value_bytes(self, value: ValueId, sizes: Sizes) -> float:
        """The size of a tensor."""
        spec = self.specs[value]
        key = (spec, tuple(sizes.items()))
        if key not in self._bytes:
            shape = spec.bind(sizes).shape
            self._bytes[key] = math.prod(int(size) for size in shape) * spec.dtype.itemsize
        return self._bytes[key]

    @property
    def rough(self) -> tuple[str, ...]:
        """Modules that could not be run and were estimated from their parameters."""
        seen = self.at(self.example)
        return tuple(dict.fromkeys(n.module or n.name for n in self.nodes if seen[n.name].is_rough))


def _sources(work: Sequence[fx.Node]) -> dict[str, tuple[str, ...]]:
    """For each node the nodes it needs, seen through those that only take apart."""
    inside = set(work)
    seen: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def reach(node: fx.Node) -> tuple[fx.Node, ...]:
        if node not in seen:
            if node in inside:
                seen[node] = (node,)
            else:
                found = (n for source in node.all_input_nodes for n in reach(source))
                seen[node] = tuple(dict.fromkeys(found))
        return seen[node]

    return {
        node.name: tuple(
            dict.fromkeys(found.name for s in node.all_input_nodes for found in reach(s))
        )
        for node in work
    }


_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal")


def _repeatable(traced: TracedGraph, work: Sequence[fx.Node]) -> frozenset[str]:
    """Nodes without gradient, parameters and chance, that follow from such nodes alone."""
    sources = _sources(work)
    found: set[str] = set()
    for node in work:
        grows = traced.facts.has_gradient(node)
        has_state = any(source.op == "get_attr" for source in node.all_input_nodes)
        if node.op == "call_module":
            has_state |= bool(traced.module.get_submodule(str(node.target)).state_dict())
        is_random = any(word in str(node.target) for word in _RANDOM)
        if not (grows or has_state or is_random) and found.issuperset(sources[node.name]):
            found.add(node.name)
    return frozenset(found)


def _parameters(traced: TracedGraph) -> tuple[dict[str, Parameter], dict[int, str]]:
    """Every parameter once, and the name that each tensor goes by."""
    found: dict[str, Parameter] = {}
    name_of: dict[int, str] = {}
    for name, tensor in traced.module.named_parameters():
        name_of[id(tensor)] = name
        found[name] = Parameter(
            name, tensor.numel(), tensor.element_size(), tensor.requires_grad, tensor.dim()
        )
    return found, name_of


def _info(
    traced: TracedGraph,
    node: fx.Node,
    markers: _Markers,
    name_of: Mapping[int, str],
) -> NodeInfo:
    module, held, is_block = "", [], False
    if node.op == "call_module":
        module = str(node.target)
        found = traced.module.get_submodule(module)
        held = [name_of[id(p)] for p in found.parameters()]
        is_block = any(True for _ in found.children())
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            owner, _, key = str(source.target).rpartition(".")
            part = getattr(traced.module.get_submodule(owner), key)
            if isinstance(part, torch.nn.Module):  # of a method that is one call
                held += [name_of[id(p)] for p in part.parameters()]
            elif isinstance(part, torch.nn.Parameter):
                held.append(name_of[id(part)])
    return NodeInfo(
        node.name,
        module or traced.facts[node].owner,
        tuple(markers.origin(value) for value in inputs_of(node, traced.facts)),
        tuple(traced.facts.tensors(node)),
        tuple(dict.fromkeys(held)),
        is_block,
    )


@dataclass(frozen=True, slots=True)
class _Marker:
    """Stands for one tensor of a node's output while structures are taken apart."""

    value: ValueId
    is_atom = True


class _Markers:
    """Follows tensors through nodes that only take nested values apart or put them together."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[fx.Node, Any] = {}

    def origin(self, value: tuple[fx.Node, int]) -> ValueId:
        node, place = value
        leaves = [leaf for _, leaf in walk(self._of(node)) if isinstance(leaf, _Marker)]
        return leaves[place].value if place < len(leaves) else (node.name, place)

    def _of(self, node: fx.Node) -> Any:
        if node not in self._known:
            if self._facts[node].is_part or isinstance(node.target, Rebuild):
                args = fx.map_arg(node.args, self._of)
                target: Any = node.target
                self._known[node] = target(*args)
            else:
                self._known[node] = self._fresh(node)
        return self._known[node]

    def _fresh(self, node: fx.Node) -> Any:
        count = 0

        def mark(leaf: Any) -> Any:
            nonlocal count
            if not isinstance(leaf, TensorSpec):
                return leaf
            count += 1
            return _Marker((node.name, count - 1))

        return map_leaves(mark, self._facts[node].spec)
