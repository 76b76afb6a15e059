"""Say which action of a timeline waited for which, from the one table of dependencies.

In:  the spans of a timeline, and the edges between stages.
Out: for each span the indices of the spans that made what it reads.

With transfers in the timeline a compute waits for a receive, a receive for its send and
a send for a compute; without them a compute waits for the other rank's compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.program import Edges, Span, Value, reads, writes

__all__ = ["edges_or_chain", "find_dependencies"]


def find_dependencies(
    spans: Sequence[Span], edges: Edges | None = None
) -> tuple[tuple[int, ...], ...]:
    """For each span, the indices of the spans it reads from, in the order of its reads."""
    edges = edges_or_chain(spans, edges)
    here: dict[tuple[int, Value], int] = {}
    made: dict[Value, int] = {}
    sent: dict[Value, int] = {}
    for index, (_, action, _, _) in enumerate(spans):
        if not action.kind.is_recv:
            made.update((value, index) for value in writes(action, edges))
        if action.kind.is_send:
            sent.update((value, index) for value in reads(action, edges))
    found: list[tuple[int, ...]] = []
    for index, (rank, action, _, _) in enumerate(spans):
        if action.kind.is_recv:
            sources = [sent.get(value) for value in writes(action, edges)]
        else:
            sources = [here.get((rank, v), made.get(v)) for v in reads(action, edges)]
        found.append(tuple(dict.fromkeys(i for i in sources if i is not None)))
        # A residual that comes back from the host is written once more.
        here.update(((rank, value), index) for value in writes(action, edges))
    return tuple(found)


def edges_or_chain(spans: Sequence[Span], edges: Edges | None) -> Edges:
    """The edges given, or a chain of all the stages that occur."""
    if edges is not None:
        return edges
    stages = (
        stage
        for span in spans
        for part in span.action.parts or (span.action,)
        for stage in (part.stage, part.peer or 0)
    )
    return Edges.chain(1 + max(stages, default=0))
