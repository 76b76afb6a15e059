"""Have a stage recompute what the model recomputes: `torch.utils.checkpoint`.

The trace marks the nodes of opened code that ran inside a `checkpoint()` with
their `Region`s, outermost first. `with_checkpoints` takes the nodes of a region
out of a stage's graph and puts one call in their place, which runs them under
`checkpoint` again. A region that a split falls into becomes one call in each stage.

Whatever stands between the first and the last node of a region goes with it;
that changes no values. The variant with `use_reentrant=True` becomes the other
one, which gives the same gradients and allows partial backwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.utils import checkpoint as torch_checkpoint

from fxpipe.graph.calls.graph_calls import GraphCall, after, given
from fxpipe.graph.facts import Facts, Region, new_graph

__all__ = ["with_checkpoints"]


def with_checkpoints(graph: fx.Graph, facts: Facts, depth: int = 0) -> fx.Graph:
    """Return the graph with a single call for the nodes of each region."""
    nodes = list(graph.nodes)
    if not any(_region(node, facts, depth) for node in nodes):
        return graph
    writer = _Writer(facts, depth)
    start = 0
    while start < len(nodes):
        region = _region(nodes[start], facts, depth)
        if region is None:
            writer.copy(nodes[start])
            start += 1
        else:
            end = _end(nodes, facts, start, region, depth)
            writer.call(region, nodes[start:end])
            start = end
    return writer.graph


def _region(node: fx.Node, facts: Facts, depth: int) -> Region | None:
    """Return the region that a node with work to do belongs to."""
    if node.op not in ("call_module", "call_method", "call_function"):
        return None
    if node.target in (after, given) or facts[node].is_part:
        return None
    regions = facts[node].regions
    return regions[depth] if len(regions) > depth else None


def _end(nodes: Sequence[fx.Node], facts: Facts, start: int, region: Region, depth: int) -> int:
    end = start + 1
    for index in range(start, len(nodes)):
        found = _region(nodes[index], facts, depth)
        if found is region:
            end = index + 1
        elif found is not None:
            break
    while end < len(nodes) and facts[nodes[end]].is_part:
        end += 1
    return end


class _Writer:
    """Copies a graph, region by region."""

    def __init__(self, facts: Facts, depth: int) -> None:
        self.graph = new_graph()
        self._facts = facts
        self._depth = depth
        self._copies: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)

    def call(self, region: Region, span: Sequence[fx.Node]) -> None:
        for node in span:
            if node.op == "get_attr":
                self.copy(node)
        work = [node for node in span if node.op != "get_attr"]
        body = _Body(self._module)
        for node in work:
            body.add(node)
        inside = set(work)
        results = [node for node in work if any(user not in inside for user in node.users)]
        inner = with_checkpoints(body.finish(results), self._facts, self._depth + 1)
        inputs = tuple(self._copies.get(node, node) for node in body.inputs)
        made = self.graph.create_node(
            "call_function", Checkpointed(inner, region.options), inputs, {}, "checkpoint"
        )
        self._facts[made] = self._facts[work[0]].origin
        for index, node in enumerate(results):
            part = self.graph.create_node(
                "call_function", operator.getitem, (made, index), {}, node.name
            )
            self._facts[part] = replace(self._facts[node], is_part=True, regions=())
            self._copies[node] = part

    def _module(self, name: str) -> fx.Node:
        return self.graph.create_node("get_attr", name, (), {}, "module")


class _Body:
    """The graph of a region; everything from outside, modules too, is an input."""

    def __init__(self, get_module: Callable[[str], fx.Node]) -> None:
        self._graph = new_graph()
        self._start = self._graph.create_node("call_function", _start, (), {})
        self._get_module = get_module
        self._modules: dict[str, fx.Node] = {}
        self._inputs: dict[fx.Node, fx.Node] = {}
        self._copies: dict[fx.Node, fx.Node] = {}

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(self._inputs)

    def add(self, node: fx.Node) -> None:
        if node.op != "call_module":
            self._copies[node] = self._graph.node_copy(node, self._get)
            return
        name = str(node.target)
        if name not in self._modules:
            self._modules[name] = self._get_module(name)
        args = (self._get(self._modules[name]), *fx.map_arg(node.args, self._get))
        kwargs = fx.map_arg(node.kwargs, self._get)
        self._copies[node] = self._graph.create_node("call_function", call, args, kwargs, node.name)

    def _get(self, node: fx.Node) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        if node not in self._inputs:
            with self._graph.inserting_before(self._start):
                self._inputs[node] = self._graph.placeholder(node.name)
        return self._inputs[node]

    def finish(self, results: Sequence[fx.Node]) -> fx.Graph:
        self._graph.output(tuple(self._copies[node] for node in results))
        self._graph.erase_node(self._start)
        return self._graph


def _start() -> None:
    """Mark the end of the placeholders while a graph is written."""


def call(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Call a module that is given as an argument."""
    return module(*args, **kwargs)


class Checkpointed(GraphCall):
    """A callable that runs a graph under `torch.utils.checkpoint`."""

    def __init__(self, graph: fx.Graph, options: Mapping[str, Any]) -> None:
        super().__init__("checkpoint")
        self.graph = graph
        self._run = fx.GraphModule(nn.Module(), graph).forward
        self._options = dict(options)

    def __call__(self, *inputs: object) -> object:
        return torch_checkpoint.checkpoint(self._run, *inputs, use_reentrant=False, **self._options)
