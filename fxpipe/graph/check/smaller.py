"""Let a small model speak for a large one of the same code.

A model that is too large to run here, or on the meta device, is checked by a smaller one:
fewer or narrower layers, the same classes. What the two traces decided must be the same:
which functions opened code calls at which lines, with which flags. Sizes may differ, and
so may the number of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx

from fxpipe.errors import TraceError
from fxpipe.graph.capture.traced_graph import TracedGraph

__all__ = ["check_same_decisions"]


def check_same_decisions(large: TracedGraph, small: TracedGraph) -> None:
    """Raise unless two traces took the same way through the same code.

    Raises:
        TraceError: lists what only one of them does.
    """
    one, other = dict(_decisions(large)), dict(_decisions(small))
    faults = [f"  only the model itself: {one[key]}" for key in one if key not in other]
    faults += [f"  only the small model: {other[key]}" for key in other if key not in one]
    if faults:
        raise TraceError(
            "the small model of check_with does not decide as the model itself does:\n"
            + "\n".join(faults[:6])
            + "\ngive a small model of the same classes and settings, with inputs of the same kind"
        )


def _decisions(traced: TracedGraph) -> Iterator[tuple[Any, str]]:
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        place = traced.facts[node].where
        target = _target(node)
        flags = tuple(_flags(node.args)), tuple(sorted(_named_flags(node)))
        shown = ", ".join([*map(str, flags[0]), *(f"{k}={v}" for k, v in flags[1])])
        yield (str(place), target, flags), f"{target}({shown}) at {place}"


def _target(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return re.sub(r"\d+", "#", name) if node.op == "call_module" else str(name)


def _flags(args: Any) -> Iterator[Any]:
    """What decides among the arguments: flags, words and Nones, but not numbers."""
    for value in args:
        if value is None or isinstance(value, (bool, str)):
            yield str(value)
        elif isinstance(value, (tuple, list)):
            yield from _flags(value)


def _named_flags(node: fx.Node) -> Iterator[tuple[str, str]]:
    for name, value in node.kwargs.items():
        if value is None or isinstance(value, (bool, str)):
            yield name, str(value)
        elif isinstance(value, fx.Node):
            yield name, "a tensor"
