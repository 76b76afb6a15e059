"""Tell dtypes that follow the model's from those that the user wrote down.

`x.to(torch.float32)` stays; `x.to(self.weight.dtype)` must follow a later
`.bfloat16()`. In a trace both are the same constant. So a model whose opened code
reads a dtype and uses one is traced once more with its floating state and inputs
in another precision: what differs between the two graphs follows the model, and is
read off a tensor when the stage runs. So do limits such as `torch.finfo(dtype).min`.

Code may also look at the dtype of a value and decide (`if x.dtype == torch.float16`). Stages
compare it when they run, and accept those dtypes with which a trace gave the same graph.

In:  the graph of a trace, the graph of the second one, and what was cast to what.
Out: the first graph, with a node in place of each constant that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxpipe.graph.calls.checks import AgreedDtype
from fxpipe.graph.calls.graph_calls import TracedDtype, dtype_of
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.facts import Ambient, Facts, leaves_of, map_pairs
from fxpipe.graph.nested import map_leaves

__all__ = [
    "HEAVY",
    "Cast",
    "cast_inputs",
    "drop_certain",
    "dtypes_looked_at",
    "dtypes_to_follow",
    "function_name",
    "keeps_parameter_dtype",
    "let_look",
    "link_dtypes",
]

HEAVY = ("matmul", "mm", "bmm", "linear", "conv", "einsum", "attention", "addmm", "baddbmm")
Cast = Mapping[torch.dtype, torch.dtype]
_LIMITS = ("min", "max", "eps", "tiny")
_OTHER = {
    torch.float64: torch.float32,
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float16,
    torch.float16: torch.bfloat16,
}
# What models are cast to, and autocast casts to.
_LOOKED_AT = [
    {one: torch.bfloat16 if one is not torch.bfloat16 else torch.float32 for one in _OTHER},
    {one: torch.float16 if one is not torch.float16 else torch.float32 for one in _OTHER},
]


def dtypes_to_follow(traced: TracedGraph) -> Cast:
    """Return the dtypes that opened code may have read off a tensor, and others to try."""
    certain = _checks(traced.graph, lambda check: _is_certain(traced, check))
    seen = {dtype for check in certain for dtype in check.target.known}
    found: dict[torch.dtype, torch.dtype] = {one: _OTHER[one] for one in seen & _OTHER.keys()}
    for node in traced.graph.nodes:
        read = traced.facts[node].dtypes_read
        for value in leaves_of((node.args, node.kwargs)) if read else ():
            for dtype in read:
                if dtype in _OTHER and (value is dtype or _limit(value, dtype) is not None):
                    found[dtype] = _OTHER[dtype]
    return found


def dtypes_looked_at(traced: TracedGraph, theirs: fx.Graph | None, cast: Cast) -> Iterator[Cast]:
    """Yield others to try of the dtypes that opened code has looked at, and that do not follow."""
    checks = _checks(traced.graph, lambda check: not _is_certain(traced, check))
    if theirs is not None and _compares(traced.graph, theirs):
        followed = {source for *_, source in _changes(traced, theirs, cast)}
        checks = [check for check in checks if check.args[0] not in followed]
    seen = {dtype for check in checks for dtype in check.target.known} & _OTHER.keys()
    for others in _LOOKED_AT if seen else ():
        yield {dtype: others[dtype] for dtype in seen}


def let_look(traced: TracedGraph, theirs: fx.Graph, cast: Cast) -> None:
    """Allow the other dtypes where code has looked at one, if it does the same with them."""
    pairs = list(zip(traced.graph.nodes, theirs.nodes, strict=False))
    counterpart = {b: a for a, b in pairs}
    is_same = _compares(traced.graph, theirs)

    def compare(ours: object, theirs: object) -> None:
        nonlocal is_same
        if isinstance(theirs, fx.Node):
            is_same &= counterpart.get(theirs) is ours
        elif _change(ours, theirs, cast) is None:
            is_same &= repr(ours) == repr(theirs)

    for a, b in pairs:
        map_pairs(compare, (a.args, a.kwargs), (b.args, b.kwargs))
    for check in _checks(traced.graph) if is_same else ():
        check.target.known |= {cast[dtype] for dtype in check.target.known if dtype in cast}


def cast_inputs(named: Mapping[str, object], cast: Cast) -> Any:
    """Return inputs like the given ones in other dtypes."""

    def one(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in cast:
            return leaf
        made = torch.empty_like(leaf, dtype=cast[leaf.dtype])
        return made.requires_grad_(leaf.requires_grad)

    return map_leaves(one, dict(named)) if cast else named


def link_dtypes(traced: TracedGraph, theirs: fx.Graph, cast: Cast) -> bool:
    """Have what differs follow the model; False if the graphs do not compare."""
    ours = traced.graph
    if not _compares(ours, theirs):
        return False
    followed = {source for *_, source in _changes(traced, theirs, cast)}
    for a, b in list(zip(ours.nodes, theirs.nodes, strict=True)):

        def one(ours: object, theirs: object, node: fx.Node = a) -> object:
            found = _change(ours, theirs, cast)
            return ours if found is None else _following(traced, node, *found)

        a.args, a.kwargs = map_pairs(one, a.args, b.args), map_pairs(one, a.kwargs, b.kwargs)
    for check in _checks(ours):
        if check.args[0] in followed:
            ours.erase_node(check)
    return True


def _changes(
    traced: TracedGraph, theirs: fx.Graph, cast: Cast
) -> list[tuple[torch.dtype, str | None, fx.Node | None]]:
    """Return the dtypes that constants follow, and off which node each was read."""
    found: list[tuple[torch.dtype, str | None, fx.Node | None]] = []
    for a, b in zip(traced.graph.nodes, theirs.nodes, strict=True):

        def one(ours: object, theirs: object, node: fx.Node = a) -> None:
            change = _change(ours, theirs, cast)
            if change is not None:
                found.append((*change, traced.facts[node].dtypes_read.get(change[0])))

        map_pairs(one, (a.args, a.kwargs), (b.args, b.kwargs))
    return found


def _compares(ours: fx.Graph, theirs: fx.Graph) -> bool:
    """Say whether two graphs do the same, but for arguments."""
    return len(ours.nodes) == len(theirs.nodes) and all(
        (a.op, function_name(a)) == (b.op, function_name(b))
        for a, b in zip(ours.nodes, theirs.nodes, strict=True)
    )


def _change(ours: object, theirs: object, cast: Cast) -> tuple[torch.dtype, str | None] | None:
    """Return the dtype that a constant follows, and which limit of it the constant is."""
    for dtype, other in cast.items():
        limit = _limit(ours, dtype)
        if ours is dtype and theirs is other:
            return dtype, None
        if limit is not None and theirs == getattr(torch.finfo(other), limit):
            return dtype, limit
    return None


def drop_certain(traced: TracedGraph) -> None:
    """Compare nothing that only a cast of the whole model can change, if one was tried."""
    for check in _checks(traced.graph, lambda check: _is_certain(traced, check)):
        (source,) = check.args
        if len(check.target.known) > 1:
            traced.graph.erase_node(check)
            if isinstance(source.target, TracedDtype):
                traced.graph.erase_node(source)


def _is_certain(traced: TracedGraph, check: Any) -> bool:
    """Say whether a check is of a value that has the dtype of the parameters."""
    (node,) = check.args
    is_state = isinstance(node.target, TracedDtype)
    return is_state or keeps_parameter_dtype(traced.module, traced.facts, node)


def _checks(graph: fx.Graph, is_wanted: Callable[[fx.Node], bool] = bool) -> list[Any]:
    found: list[Any] = [node for node in graph.nodes if isinstance(node.target, AgreedDtype)]
    return [check for check in found if is_wanted(check)]


def _following(
    traced: TracedGraph, node: fx.Node, dtype: torch.dtype, limit: str | None
) -> fx.Node:
    facts = traced.facts
    source = facts[node].dtypes_read.get(dtype)
    with node.graph.inserting_before(node):
        if source is None or keeps_parameter_dtype(traced.module, facts, source):
            made = node.graph.call_function(TracedDtype(dtype, limit))
        else:
            made = node.graph.call_function(dtype_of, (source, limit))
    value = dtype if limit is None else getattr(torch.finfo(dtype), limit)
    facts[made] = replace(facts[node].origin, spec=value)
    return made


def _limit(value: object, dtype: torch.dtype) -> str | None:
    if type(value) is not float or not dtype.is_floating_point:
        return None
    return next((key for key in _LIMITS if getattr(torch.finfo(dtype), key) == value), None)


def keeps_parameter_dtype(module: nn.Module, facts: Facts, node: fx.Node) -> bool:
    """Say whether a value has the dtype of the parameters, whatever autocast does."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "call_module":
            if not isinstance(module.get_submodule(str(current.target)), nn.Embedding):
                return False
            continue
        if current.op not in ("call_method", "call_function"):
            return False
        if facts[current].ambient != Ambient():
            return False
        name = function_name(current)
        inputs = [n for n in current.all_input_nodes if facts.has_gradient(n)]
        casts = name in ("to", "float", "half", "bfloat16")
        if not inputs or casts or any(word in name for word in HEAVY):
            return False
        stack.extend(inputs)
    return True


def function_name(node: fx.Node) -> str:
    """Return the name of what a node calls."""
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")
