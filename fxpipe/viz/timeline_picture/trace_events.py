"""Write a timeline as trace events, which Perfetto and chrome://tracing open.

One process per rank; in it a thread each for compute, sends, receives and the handling
of parameters, a counter for memory, and arrows from each send to its receive (or, if
the timeline has no transfers, from the compute that makes a value to the one on another
rank that reads it).

Trace events count microseconds. A time with a unit is converted; one without is shown
as if it were milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fxpipe.program import Action, Edges, Kind, Span, Timeline
from fxpipe.viz.palette import LOOKS
from fxpipe.viz.timeline_picture.spans import SECONDS, find_dependencies, number_lanes

__all__ = ["write_trace_events"]

_THREADS = ("compute", "send", "receive", "parameters")
_LANES_PER_THREAD = 1000


def write_trace_events(
    timeline: Timeline,
    *,
    title: str = "",
    time_unit: str = "",
    edges: Edges | None = None,
    measured: Timeline | None = None,
) -> str:
    """The timeline as JSON text; a measured one becomes processes of its own."""
    scale = SECONDS.get(time_unit, 1e-3) * 1e6
    events = list(_events(timeline, scale, edges, first_process=0, suffix=""))
    if measured is not None:
        first, suffix = timeline.num_ranks, " (measured)"
        events += _events(measured, scale, edges, first_process=first, suffix=suffix)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "makespan": timeline.makespan, "idle": timeline.idle},
    }
    return json.dumps(document, separators=(",", ":"))


_Event = dict[str, Any]


def _events(
    timeline: Timeline, scale: float, edges: Edges | None, *, first_process: int, suffix: str
) -> Iterator[_Event]:
    threads = _thread_of(timeline)
    for rank in range(timeline.num_ranks):
        yield from _names(rank, first_process, suffix, threads)
    critical = set(timeline.critical_path)
    for index, span in enumerate(timeline.spans):
        yield {
            "ph": "X",
            "name": str(span.action),
            "cat": LOOKS[span.action.kind].name,
            "pid": first_process + span.rank,
            "tid": threads[index],
            "ts": _round(span.start * scale),
            "dur": _round((span.end - span.start) * scale),
            "args": _arguments(span.action) | {"on_critical_path": span in critical},
        }
    yield from _arrows(timeline.spans, scale, edges, threads, first_process)
    for rank, curve in enumerate(timeline.memory):
        for moment, held in curve:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": first_process + rank,
                "tid": 0,
                "ts": _round(moment * scale),
                "args": {"held": held},
            }


def _thread_of(timeline: Timeline) -> list[int]:
    """A thread for each span: events of one thread may not overlap, so lanes are threads."""
    lanes = number_lanes(timeline.spans, lambda span: (span.rank, _group(span)))
    groups = map(_group, timeline.spans)
    return [group * _LANES_PER_THREAD + lane for group, lane in zip(groups, lanes, strict=True)]


def _group(span: Span) -> int:
    kind = span.action.kind
    return 0 if span.is_compute else 1 if kind.is_send else 2 if kind.is_recv else 3


def _names(rank: int, first: int, suffix: str, threads: Sequence[int]) -> Iterator[_Event]:
    process = first + rank
    yield _meta("process_name", process, 0, {"name": f"rank {rank}{suffix}"})
    # A measured rank stands directly below its simulated one.
    yield _meta("process_sort_index", process, 0, {"sort_index": 2 * rank + bool(suffix)})
    for thread in sorted(set(threads)):
        group, lane = divmod(thread, _LANES_PER_THREAD)
        name = _THREADS[group] + (f" {lane + 1}" if lane else "")
        yield _meta("thread_name", process, thread, {"name": name})
        yield _meta("thread_sort_index", process, thread, {"sort_index": thread})


def _meta(name: str, process: int, thread: int, arguments: dict[str, Any]) -> _Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _arguments(action: Action) -> dict[str, Any]:
    if action.kind is Kind.OVERLAP:
        return {"parts": [str(part) for part in action.parts]}
    arguments: dict[str, Any] = {"stage": action.stage}
    if action.microbatch is not None:
        arguments["microbatch"] = action.microbatch
    if action.peer is not None:
        arguments["peer"] = action.peer
    return arguments


def _arrows(
    spans: Sequence[Span],
    scale: float,
    edges: Edges | None,
    threads: Sequence[int],
    first_process: int,
) -> Iterator[_Event]:
    number = first_process * 1_000_000
    for target, sources in enumerate(find_dependencies(spans, edges)):
        for source in sources:
            before, after = spans[source], spans[target]
            if before.rank == after.rank:
                continue
            # A send and its receive run at the same time; the arrow joins their starts.
            start = before.start if after.action.kind.is_recv else before.end
            # An arrow ends inside its slice, or viewers bind it to the one before.
            inside = after.start + min((after.end - after.start) / 2, 1e-3 / scale)
            number += 1
            common = {"name": "value", "cat": "value", "id": number}
            yield common | {
                "ph": "s",
                "pid": first_process + before.rank,
                "tid": threads[source],
                "ts": _round(max(before.start, start - 1e-3 / scale) * scale),
            }
            yield common | {
                "ph": "f",
                "bp": "e",
                "pid": first_process + after.rank,
                "tid": threads[target],
                "ts": _round(inside * scale),
            }


def _round(microseconds: float) -> float:
    return round(microseconds, 4)
