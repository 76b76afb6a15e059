"""Decide which modules to open and, without other wishes, where to cut.

A module is opened only if a cut has to fall inside it; every other module stays
one call. Opening and cutting are separate: `choose_opened` names modules before
the trace, `split_evenly` assigns the traced nodes to stages after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx, nn

from fxpipe.errors import SplitError
from fxpipe.graph.capture import TracedGraph
from fxpipe.graph.cut import Assignment
from fxpipe.graph.flow import work_nodes

__all__ = ["ancestors", "choose_opened", "split_evenly"]


def ancestors(names: Iterable[str]) -> set[str]:
    """Return the names of all modules around the given ones, the model ("") included."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return found


def choose_opened(module: nn.Module, num_stages: int) -> set[str]:
    """Return the modules to open so that `num_stages` equal stages become possible.

    The heaviest module is opened as long as it holds more than half a stage's
    share of the parameters and has parts to spread.
    """
    opened = {""}
    parts = {name: _weight(child) for name, child in module.named_children()}
    total = sum(parts.values()) or 1
    while parts:
        name, weight = max(parts.items(), key=lambda item: item[1])
        children = dict(module.get_submodule(name).named_children())
        if weight * num_stages <= total and len(parts) >= num_stages:
            break
        if weight * 2 * num_stages <= total:
            break
        del parts[name]
        if children and weight:
            opened.add(name)
            parts.update({f"{name}.{key}": _weight(child) for key, child in children.items()})
        elif not any(_weight(module.get_submodule(other)) for other in parts):
            break
    return opened


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def split_evenly(traced: TracedGraph, num_stages: int) -> Assignment:
    """Assign nodes to stages, in order, so that the heaviest stage is as light as possible.

    Raises:
        SplitError: there are fewer places to cut than asked for.
    """
    nodes = work_nodes(traced)
    weights = [_node_weight(traced, node) for node in nodes]
    heavy = [index for index, weight in enumerate(weights) if weight > 0]
    if num_stages < 1 or num_stages > len(heavy):
        raise SplitError(
            f"cannot make {num_stages} stages: the captured graph has {len(heavy)} parts with "
            "parameters to spread; ask for fewer stages or use granularity='op'"
        )
    starts = _balanced([weights[index] for index in heavy], num_stages)
    begins = {heavy[start] for start in starts[1:]}
    stage_of: dict[str, int] = {}
    stage = 0
    for index, node in enumerate(nodes):
        if index in begins:
            stage += 1
        stage_of[node.name] = stage
    return Assignment(stage_of)


def _node_weight(traced: TracedGraph, node: fx.Node) -> int:
    if node.op != "call_module":
        return 0
    return _weight(traced.module.get_submodule(str(node.target)))


def _balanced(weights: Sequence[int], num_stages: int) -> list[int]:
    """Return where each stage starts so that the largest sum is smallest."""
    count = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best = {(0, 0): (0, -1)}
    for stage in range(1, num_stages + 1):
        for end in range(stage, count - (num_stages - stage) + 1):
            options = [
                (max(best[stage - 1, start][0], sums[end] - sums[start]), start)
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            ]
            best[stage, end] = min(options)
    starts: list[int] = []
    end = count
    for stage in range(num_stages, 0, -1):
        end = best[stage, end][1]
        starts.insert(0, end)
    return starts
