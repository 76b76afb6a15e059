"""What all pictures of timelines are made from: numbers with units, ticks, lanes, dependencies.

A program knows no units; whoever draws says in `Words` what a number of time or of memory means.

Which action waited for which comes from the one table of dependencies. With transfers in the
timeline a compute waits for a receive, a receive for its send and a send for a compute; without
them a compute waits for the other rank's compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from fxpipe.errors import FxpipeError
from fxpipe.program import Edges, Span, Timeline, Value, reads, writes
from fxpipe.text import bytes_text, number_text, seconds_text

__all__ = ["SECONDS", "Words", "find_dependencies", "nice_ticks", "number_lanes", "runs_beside"]

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""How many seconds one of a unit of time is."""


@dataclass(frozen=True, slots=True)
class Words:
    """The title of a picture, and what one of time or of memory means.

    A unit is "s", "ms", "us", "bytes", any other word, or nothing.
    """

    title: str = ""
    time_unit: str = ""
    memory_unit: str = ""

    def __post_init__(self) -> None:
        for unit in (self.time_unit, self.memory_unit):
            if not isinstance(unit, str):
                raise FxpipeError(f"a unit is a word such as 'ms' or 'bytes', got {unit!r}")

    def time(self, value: float) -> str:
        """A time with its unit, three or four digits."""
        return _with_unit(value, self.time_unit)

    def memory(self, value: float) -> str:
        """An amount of memory with its unit, three or four digits."""
        return _with_unit(value, self.memory_unit)

    def figures(self, timeline: Timeline) -> list[str]:
        """What matters most: such as "makespan 12", "idle 25.0%", "peak memory 3"."""
        figures = [f"makespan {self.time(timeline.makespan)}", f"idle {timeline.idle:.1%}"]
        if any(timeline.peak_memory):
            figures.append(f"peak memory {self.memory(max(timeline.peak_memory))}")
        return figures


def _with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return bytes_text(value)
    if unit in SECONDS:
        return seconds_text(value * SECONDS[unit])
    return f"{number_text(value)} {unit}".rstrip()


def nice_ticks(end: float, most: int) -> list[float]:
    """At most about `most` round numbers from 0 to `end`."""
    if not end > 0 or not math.isfinite(end):
        return [0.0]
    rough = end / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10, 20) if power * m >= rough * 0.999)
    return [step * index for index in range(math.floor(end / step * 1.0001) + 1)]


def runs_beside(span: Span) -> bool:
    """Whether something that is not compute is drawn; what takes no time is not."""
    return not span.is_compute and span.end > span.start


def number_lanes(spans: Sequence[Span], group_of: Callable[[Span], Hashable]) -> list[int]:
    """For each span a lane in which it overlaps no other of its group; -1 for the group None."""
    lanes = [-1] * len(spans)
    ends: dict[Hashable, list[float]] = {}
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        group, start = group_of(spans[index]), spans[index].start
        if group is not None:
            taken = ends.setdefault(group, [])
            lane = next((i for i, end in enumerate(taken) if end <= start + 1e-12), len(taken))
            taken[lane : lane + 1] = [spans[index].end]
            lanes[index] = lane
    return lanes


def find_dependencies(
    spans: Sequence[Span], edges: Edges | None = None
) -> tuple[tuple[int, ...], ...]:
    """For each span, the indices of the spans it reads from, in the order of its reads.

    Without `edges` the stages that occur are taken for a chain.
    """
    if edges is None:
        parts = (part for span in spans for part in span.action.each)
        stages = (stage for part in parts for stage in (part.stage, part.peer or 0))
        edges = Edges.chain(1 + max(stages, default=0))
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
