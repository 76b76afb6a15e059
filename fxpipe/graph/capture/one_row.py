"""Take a size of one where code asks for it, and then does the same.

In:  a graph with conditions that refuse such a size, as `batch != 1`, and a way to capture again.
Out: the graph without them, if a capture at that size gives the same operations.

A symbol stands for sizes from two on, so what code asks of it (`if rows > 1 and given == 1`) is
answered for those. One row is what a microbatch may have, so that is tried by itself. An operation
that repeats a tensor once (`if len(x) == 1: x = x.expand(rows, 4)`) is none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import sympy
import torch
from torch import fx

from fxpipe.graph.calls.graph_calls import Refusal
from fxpipe.graph.capture.one_run import Settings, Task
from fxpipe.graph.capture.second_run import did_the_same, is_same
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.dims import free_names, holds, symbol
from fxpipe.graph.facts import new_graph
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import map_leaves, walk
from fxpipe.graph.sizes.symbols import InputDim

__all__ = ["taking_one"]


def taking_one(
    traced: TracedGraph,
    task: Task,
    settings: Settings,
    capture: Callable[[Task, Settings], TracedGraph],
) -> TracedGraph:
    """Return a graph without the conditions that refuse one, where there is no reason for them."""
    conditions = traced.inputs.conditions
    for name in dict.fromkeys(itertools.chain(*map(free_names, conditions))):
        refusing = [c for c in conditions if free_names(c) == {name} and _refuses_only_one(c, name)]
        places = {place for place, size in settings.wishes.dims.items() if size == symbol(name)}
        is_alone = all(
            place in places or name not in free_names(size)
            for place, size in settings.wishes.dims.items()
        )
        if not refusing or not is_alone:
            continue
        why = f"with {name} = 1, since code asks for that"
        wishes = settings.wishes.fixing({name}, why)
        with suppress(Exception):
            one = capture(
                _narrowed(task, places), dataclasses.replace(settings, wishes=wishes, why=why)
            )
            if _does_the_same(traced, one, name):
                conditions = tuple(c for c in conditions if c not in refusing)
                inputs = dataclasses.replace(traced.inputs, conditions=conditions)
                world = traced.world.joined(one.world)
                traced = dataclasses.replace(traced, inputs=inputs, world=world)
    return traced


def _refuses_only_one(condition: sympy.Basic, name: str) -> bool:
    size = symbol(name)
    return condition in (sympy.Ne(size, 1), size > 1, size >= 2) and not holds(condition, {name: 1})


def _narrowed(task: Task, places: Collection[InputDim]) -> Task:
    """Return the task with an example that is of size one in some places."""
    paths = iter([path for path, _ in walk(dict(task.named))])

    def one(leaf: object) -> object:
        path = next(paths)
        for dim in range(leaf.dim()) if isinstance(leaf, torch.Tensor) else ():
            if InputDim(path, dim) in places:
                assert isinstance(leaf, torch.Tensor)
                leaf = leaf.narrow(dim, 0, 1)
        return leaf

    named: Mapping[str, object] = map_leaves(one, dict(task.named))
    return dataclasses.replace(task, named=named, other_mode=[], failed_in=[])


def _does_the_same(traced: TracedGraph, one: TracedGraph, name: str) -> bool:
    """Say whether two graphs are equal where a size is one."""
    known = {symbol(name): sympy.Integer(1)}

    def is_equal(ours: object, theirs: object) -> bool:
        sizes = [s.xreplace(known) if isinstance(s, sympy.Basic) else s for s in (ours, theirs)]
        if isinstance(ours, sympy.Basic) or isinstance(theirs, sympy.Basic):
            return bool(sizes[0] == sizes[1])
        if isinstance(ours, TensorSpec) and isinstance(theirs, TensorSpec):
            at_one = tuple(map(is_equal, ours.shape, theirs.shape))
            same_kind = (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
            return len(ours.shape) == len(theirs.shape) and all(at_one) and same_kind
        return is_same(ours, theirs)

    def is_equal_spec(ours: object, theirs: object) -> bool:
        parts = [list(walk(spec)) for spec in (ours, theirs)]
        return len(parts[0]) == len(parts[1]) and all(
            at == there and is_equal(part, other)
            for (at, part), (there, other) in zip(*parts, strict=True)
        )

    graphs = [_without_repeats(graph, is_equal_spec) for graph in (traced, one)]
    pairs = did_the_same(graphs[0], graphs[1], is_equal)
    ours = {condition.xreplace(known) for condition in traced.inputs.conditions}
    refusals = [
        [node.target.message for node in graph.nodes if isinstance(node.target, Refusal)]
        for graph in (traced.graph, one.graph)
    ]
    return (
        pairs is not None
        and refusals[0] == refusals[1]
        and set(one.inputs.conditions) <= ours
        and (traced.flags, traced.modes) == (one.flags, one.modes)
        and all(
            is_equal_spec(traced.facts[node].spec, one.facts[other].spec)
            and traced.facts[node].ambient == one.facts[other].ambient
            and traced.facts[node].mode == one.facts[other].mode
            for node, other in pairs.items()
        )
    )


# What these return is the tensor that they are given, if it has its size.
_REPEAT = ("broadcast_to", "expand", "repeat", "repeat_interleave", "tile")


def _without_repeats(
    traced: TracedGraph, is_equal_spec: Callable[[object, object], bool]
) -> fx.Graph:
    """Return a copy of a graph without operations that repeat a tensor once."""
    graph, facts = new_graph(), traced.facts
    graph.output(graph.graph_copy(traced.graph, {}))

    def repeats_once(node: fx.Node) -> bool:
        name = getattr(node.target, "__name__", node.target)
        if name not in _REPEAT or len(node.all_input_nodes) != 1 or not node.args:
            return False
        source = node.all_input_nodes[0]
        is_changed = any(facts[part].storage is not None for part in (node, source))
        in_all_modes = facts[node].mode is None
        is_same = is_equal_spec(facts[source].spec, facts[node].spec)
        return node.args[0] is source and in_all_modes and is_same and not is_changed

    for node in filter(repeats_once, list(graph.nodes)):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    return graph
