"""Tell state that decides what the next run does from state that is only written again.

In:  two traces of one model, the second from the state in which the first has left it.
Out: the first, without the refusals for attributes that made no difference.

Code may read an attribute and set it, though each run begins anew: `if self.offsets is None
or is_first_token`. That is harmless if the second run does the same operations and leaves
the same state. Then every later run does, too: it starts where the second has started.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxpipe.graph.calls.checks import AgreedSizes
from fxpipe.graph.calls.graph_calls import GraphCall, Kept, Refusal
from fxpipe.graph.facts import map_pairs
from fxpipe.graph.guard.world import find
from fxpipe.graph.nested import SYMBOLIC, closed_over, is_atom
from fxpipe.graph.record.recorder import Trace

__all__ = ["did_the_same", "forgive_carried", "is_same"]


def forgive_carried(first: Trace, second: Trace) -> None:
    """Drop the first run's refusals of what it carries, if the second did the same."""
    left = []
    for carried in first.carried:
        now = find(carried.read.holder, carried.read.name)[1]
        if type(now) is dict and now is carried.read.value:
            return  # filled in place: a stage fills only lists again
        left.append((carried.value, now))
    if not all(_is_alike(*pair) for pair in left) or not did_the_same(
        first.tape.graph, second.tape.graph, is_same
    ):
        return
    faults = {carried.fault for carried in first.carried}
    for carried in first.carried:
        first.reads.forget(carried.read)
    for node in list(first.tape.graph.nodes):
        if isinstance(node.target, Refusal) and node.target.message in faults:
            first.tape.graph.erase_node(node)


def _is_alike(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        sizes = [[str(size) for size in tensor.shape] for tensor in (one, other)]
        return sizes[0] == sizes[1] and one.dtype == other.dtype
    if isinstance(one, SYMBOLIC) and isinstance(other, SYMBOLIC):
        return str(one) == str(other)
    if isinstance(one, nn.Module):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(_is_alike, one.values(), other.values()))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return is_atom(one) and type(one) is type(other) and bool(one == other)


def did_the_same(
    first: fx.Graph, second: fx.Graph, is_alike: Callable[[object, object], bool]
) -> dict[fx.Node, fx.Node] | None:
    """Return the second's node for each of the first's; None if their operations differ."""
    ours, theirs = _work(first), _work(second)
    if len(ours) != len(theirs):
        return None
    counterpart = dict(zip(theirs, ours, strict=True))
    same = True

    def compare(one: object, other: object) -> None:
        nonlocal same
        if isinstance(other, fx.Node):
            same &= counterpart.get(other) is one
        else:
            same &= is_alike(one, other)

    for other, one in counterpart.items():
        same &= one.op == other.op and is_same(one.target, other.target)
        map_pairs(compare, (one.args, one.kwargs), (other.args, other.kwargs))
    return dict(zip(ours, theirs, strict=True)) if same else None


def is_same(one: Any, other: Any) -> bool:
    """Compare what two runs have made: constants, and our callables by what they hold."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, types.FunctionType):
        inside = closed_over(one), closed_over(other)
        return one.__code__ is other.__code__ and all(map(is_same, *inside))
    if isinstance(one, GraphCall):
        return one == other or all(map(is_same, vars(one).values(), vars(other).values()))
    return bool(one == other) or (is_atom(one) and repr(one) == repr(other))


def _work(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph but for refusals and constants that are left behind.

    Nor checks of sizes: the second run has fewer, since the first has settled some sizes.
    """
    return [
        node
        for node in graph.nodes
        if not isinstance(node.target, (Refusal, AgreedSizes))
        and not (isinstance(node.target, Kept) and not node.all_input_nodes)
    ]
