"""When everything happened in a simulated (or measured) step.

A `Timeline` holds spans `(rank, action, start, end)` and the memory of each rank
over time, and works out the figures people compare: makespan, the two idle
shares, peak memory, and the chain of spans that the makespan hangs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from fxpipe.program.action import Action, Kind

__all__ = ["Span", "Timeline"]


class Span(NamedTuple):
    """One action from start to end. Both halves of a transfer have the same times."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def is_compute(self) -> bool:
        return self.action.kind.is_compute or self.action.kind is Kind.OVERLAP


@dataclass(frozen=True)
class Timeline:
    """What one step looks like in time.

    A compute span begins when its inputs are there. `spans` is sorted by start.
    `memory[rank]` is a curve of `(time, bytes)`: from each time on the rank holds so many
    bytes; it is empty where memory was not measured. `critical_path` is a chain of spans,
    each started by the end of the one before, that ends with the makespan.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    critical_path: tuple[Span, ...]

    @cached_property
    def makespan(self) -> float:
        """The time from the start to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time it spends computing."""
        busy = [0.0] * self.num_ranks
        for span in self.spans:
            if span.is_compute:
                busy[span.rank] += span.end - span.start
        return tuple(busy)

    @cached_property
    def extent(self) -> tuple[tuple[float, float], ...]:
        """For each rank, when its first compute starts and its last one ends."""
        starts = [self.makespan] * self.num_ranks
        ends = [0.0] * self.num_ranks
        for span in self.spans:
            if span.is_compute:
                starts[span.rank] = min(starts[span.rank], span.start)
                ends[span.rank] = max(ends[span.rank], span.end)
        return tuple(zip(starts, ends, strict=True))

    @cached_property
    def period(self) -> float:
        """The time from one step to the next if ranks do not wait for each other in between.

        Each rank may begin its next step when its own is done, so steps follow each other as
        quickly as the rank with the longest own span allows.
        """
        return max((end - start for start, end in self.extent), default=0.0)

    @property
    def idle_per_rank(self) -> tuple[float, ...]:
        """For each rank, the share of the makespan in which it does not compute."""
        return tuple(_idle(busy, self.makespan) for busy in self.busy)

    @property
    def idle(self) -> float:
        """The share of all ranks' time, from 0 to the makespan, without compute."""
        return sum(self.idle_per_rank) / self.num_ranks

    @property
    def idle_in_span_per_rank(self) -> tuple[float, ...]:
        """For each rank, the idle share between its own first and last compute."""
        return tuple(
            _idle(busy, end - start)
            for busy, (start, end) in zip(self.busy, self.extent, strict=True)
        )

    @property
    def idle_in_span(self) -> float:
        """The idle share of the worst rank between its own first and last compute.

        The figure of the zero-bubble papers: the start offset of later ranks does not
        count, which is fair only if ranks may begin the next step on their own.
        """
        return max(self.idle_in_span_per_rank)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """For each rank, the most bytes it ever holds; empty if memory was not measured."""
        if not any(self.memory):
            return ()
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.memory)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank by start."""
        return tuple(span for span in self.spans if span.rank == rank)

    def draw(self, path: str | PathLike[str], **options: Any) -> Path:
        """Write a picture of the timeline; see `fxpipe.viz.draw_timeline`."""
        from fxpipe.viz.timeline import draw_timeline

        return draw_timeline(self, path, **options)

    def _repr_svg_(self) -> str:
        from fxpipe.viz.timeline import timeline_svg

        return timeline_svg(self)


def _idle(busy: float, time: float) -> float:
    """The idle share; sums of fractions may make `busy` a hair longer than `time`."""
    return max(0.0, 1 - busy / time) if time > 0 else 0.0
