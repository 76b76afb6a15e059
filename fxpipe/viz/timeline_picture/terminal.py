"""Show a timeline in a terminal: one line of characters per rank, in colour if possible.

    rank 0 |F0-F1-            B0====B1====| 27% idle  peak 2
    rank 1 |   F0-B0====F1-B1====         | 27% idle  peak 1

A box starts with its letter and goes on with a character of its kind, so that the
text without colour says the same: `-` forward, `=` backward, `~` input half, `.` weight
half. If there are several stages on a rank the stage comes first, as in a program: 4F0.
Boxes too narrow for that lose the stage, then the microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.program import Action, Kind, Span, Timeline
from fxpipe.text import number_text
from fxpipe.viz.palette import LOOKS, ON_COLOUR, shade, shades
from fxpipe.viz.timeline_picture.spans import Words, nice_ticks, runs_beside

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["TimelineView", "timeline_text"]

_FILL = {
    Kind.FORWARD: "-",
    Kind.BACKWARD: "=",
    Kind.BACKWARD_INPUT: "~",
    Kind.BACKWARD_WEIGHT: ".",
    Kind.OVERLAP: "+",
}
_WIDEST = 2000


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of characters that look alike."""

    text: str
    colour: str = ""
    is_faint: bool = False


def timeline_text(
    timeline: Timeline,
    *,
    width: int | None = None,
    title: str = "",
    time_unit: str = "",
    memory_unit: str = "",
) -> str:
    """The timeline as plain text, at most `width` characters wide.

    Without a width it is as wide as it takes to label every box.
    """
    lines = _lines(timeline, width, Words(title, time_unit, memory_unit))
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines) + "\n"


@dataclass(frozen=True, slots=True)
class TimelineView:
    """A timeline that rich can print: `console.print(TimelineView(timeline))`."""

    timeline: Timeline
    title: str = ""
    time_unit: str = ""
    memory_unit: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        words = Words(self.title, self.time_unit, self.memory_unit)
        for line in _lines(self.timeline, options.max_width, words):
            text = Text(no_wrap=True)
            for piece in line:
                style = f"{ON_COLOUR} on {piece.colour}" if piece.colour else ""
                text.append(piece.text, style="dim" if piece.is_faint else style)
            yield text


def _lines(timeline: Timeline, width: int | None, words: Words) -> Iterator[list[_Piece]]:
    names = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    room = max(map(len, names))
    stages = shades(timeline.spans)
    many = max((count for _, count in stages.values()), default=1) > 1
    columns, ends = _fit(timeline, width, room, many, _row_ends(timeline, words))
    if words.title:
        yield [_Piece(words.title)]
    yield [_Piece(", ".join(words.figures(timeline)), is_faint=True)]
    for rank, name in enumerate(names):
        spans = timeline.of_rank(rank)
        start = _Piece(f"{name:>{room}} |")
        end = _Piece(f"| {ends[rank]}".rstrip(), is_faint=True)
        yield [start, *_compute_row(spans, timeline.makespan, columns, many, stages), end]
        lane = _lane_row(spans, timeline.makespan, columns)
        if lane.strip():
            yield [_Piece(" " * (room + 2)), _Piece(lane, is_faint=True)]
    axis = f"{_axis(timeline.makespan, columns)} {words.time_unit}".rstrip()
    yield [_Piece(" " * (room + 2) + axis, is_faint=True)]
    yield [_Piece(_legend(timeline), is_faint=True)]


def _fit(
    timeline: Timeline, width: int | None, room: int, many: bool, ends: list[str]
) -> tuple[int, list[str]]:
    """How many columns time gets; the ends of rows are left out if that helps."""
    columns = _natural_columns(timeline, many)
    if width is None:
        return columns, ends
    without = width - room - 3
    free = without - 1 - max(map(len, ends), default=0)
    if columns <= free:
        return columns, ends
    steps = _steps(timeline)
    if steps and without // steps > max(free // steps, 0):
        return min(columns, without // steps * steps), [""] * len(ends)
    if steps and free // steps:
        return free // steps * steps, ends
    if free >= without // 2:
        return free, ends
    return max(without, 8), [""] * len(ends)


def _natural_columns(timeline: Timeline, many: bool) -> int:
    """Columns enough to label every box and to leave a character of fill in it."""
    needed = [
        (len(_labels(span.action, many)[0]) + 1) / (span.end - span.start)
        for span in timeline.spans
        if span.is_compute and span.end > span.start
    ]
    return min(_WIDEST, max(16, math.ceil(max(needed, default=1.0) * timeline.makespan - 1e-9)))


def _steps(timeline: Timeline) -> int | None:
    """The number of equal steps of time, if every box starts and ends on one."""
    times = {time for s in timeline.spans if s.is_compute for time in (s.start, s.end)}
    shortest = min((s.end - s.start for s in timeline.spans if s.is_compute), default=0.0)
    if shortest <= 0:
        return None
    for parts in (1, 2, 3):
        counts = [time / shortest * parts for time in (*times, timeline.makespan)]
        if all(abs(count - round(count)) < 1e-6 for count in counts):
            return round(counts[-1])
    return None


def _labels(action: Action, many: bool) -> list[str]:
    """What a box may say, from the longest."""
    if action.parts:
        inner = [_labels(part, many) for part in action.parts]
        return [*map("".join, zip(*inner, strict=True)), LOOKS[action.kind].letter]
    short = f"{LOOKS[action.kind].letter}{action.microbatch}"
    return [str(action) if many else short, short, LOOKS[action.kind].letter]


def _compute_row(
    spans: Sequence[Span],
    makespan: float,
    columns: int,
    many: bool,
    stages: dict[int, tuple[int, int]],
) -> Iterator[_Piece]:
    at = 0
    for span in spans:
        if not span.is_compute:
            continue
        start, end = (_column(time, makespan, columns) for time in (span.start, span.end))
        start = max(start, at)
        if end <= start:
            continue
        if start > at:
            yield _Piece(" " * (start - at))
        label = next(text for text in _labels(span.action, many) if len(text) <= end - start)
        text = label + _FILL[span.action.kind] * (end - start - len(label))
        part = span.action.each[0]
        yield _Piece(text, shade(part.kind, *stages[part.stage]))
        at = end
    yield _Piece(" " * (columns - at))


def _lane_row(spans: Sequence[Span], makespan: float, columns: int) -> str:
    """What runs beside compute: > activations, < gradients, # parameters, * several of them."""
    row = [" "] * columns
    for span in spans:
        if not runs_beside(span):
            continue
        kind = span.action.kind
        sign = LOOKS[kind].letter if kind.is_transfer else "#"
        start = min(_column(span.start, makespan, columns), columns - 1)
        end = max(_column(span.end, makespan, columns), start + 1)
        for column in range(start, end):
            row[column] = sign if row[column] in (" ", sign) else "*"
    return "".join(row)


def _column(time: float, makespan: float, columns: int) -> int:
    return round(time / makespan * columns) if makespan else 0


def _axis(makespan: float, columns: int) -> str:
    axis = [" "] * (columns + 24)
    free = 0
    for tick in nice_ticks(makespan, max(1, columns // 10)):
        at = _column(tick, makespan, columns)
        text = number_text(tick)
        if at >= free:
            axis[at : at + len(text)] = text
            free = at + len(text) + 1
    return "".join(axis).rstrip()


def _row_ends(timeline: Timeline, words: Words) -> list[str]:
    ends = [f"{idle:4.0%} idle" for idle in timeline.idle_per_rank]
    if any(timeline.peak_memory):
        peaks = [words.memory(peak) for peak in timeline.peak_memory]
        ends = [f"{end}  peak {peak}" for end, peak in zip(ends, peaks, strict=True)]
    return ends


def _legend(timeline: Timeline) -> str:
    kinds = {
        part.kind
        for span in timeline.spans
        for part in (span.action, *span.action.parts)
        if span.is_compute
    }
    parts = [f"{LOOKS[k].letter}{_FILL[k]} {LOOKS[k].name}" for k in sorted(kinds)]
    lanes = {span.action.kind for span in filter(runs_beside, timeline.spans)}
    if any(kind.is_transfer for kind in lanes):
        parts.append("> activation, < gradient in transfer")
    if any(not kind.is_transfer for kind in lanes):
        parts.append("# parameters gathered or reduced")
    return "  ".join(parts)
