"""Make graphs, and go through the arguments of their nodes: nested tuples, lists, dicts, slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

__all__ = ["leaves_of", "map_arguments", "map_pairs", "new_graph"]


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


def leaves_of(args: Any) -> Iterator[Any]:
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


def map_pairs(join: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Return arguments made of two that may differ; `join` gets what does not line up."""
    if isinstance(left, (tuple, list)) and type(left) is type(right) and len(left) == len(right):
        parts = [map_pairs(join, a, b) for a, b in zip(left, right, strict=True)]
        return _sequence(left, parts)
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return {key: map_pairs(join, left[key], right[key]) for key in left}
    return join(left, right)


def _sequence(like: Any, parts: list[Any]) -> Any:
    # A named tuple takes its fields one by one.
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
