"""Lay out a timeline as a picture: one row of boxes per rank, memory below.

In:  a `Timeline`, and optionally a measured one of the same program.
Out: a `Scene`.

    title
    figures
    legend
    rank 0  [F0][F1][F2]      [B0 ]...                       27% idle
            >>   >>        <<                                (transfers, if any)
    rank 1      [F0]...
            0    5    10    15                               time
    rank 0  __|--|____                                       peak 4

Kinds differ in colour, letter and hatch; a pair of actions that run at the same time is a box in
two halves. A transfer has a lane of its own below its rank's boxes, since it runs beside compute;
transfers that overlap in time get as many lanes as they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fxpipe.program import Action, Kind, Span, Timeline
from fxpipe.text import number_text
from fxpipe.viz.palette import LIGHT, LOOKS, ON_COLOUR, TRANSFERS, lighten, shade, shades
from fxpipe.viz.scene import Area, Box, Item, Label, Line, Scene, fit_text, text_width
from fxpipe.viz.timeline_picture.spans import Words, nice_ticks, number_lanes, runs_beside

__all__ = ["lay_out_timeline"]

_MARGIN, _BESIDE = 16.0, 78
_LANE = 7.0
_FOOT = 0.27  # of a box has its hatch, below its label
_TITLE, _TEXT, _SMALL = 15.0, 11.0, 10.0
_NARROWEST, _WIDEST = 860.0, 2200.0

_Labels = Literal["letters", "numbers", "none"]
_Place = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is drawn, the simulated timeline first, and where time runs.

    All boxes say alike: the action and the microbatch, the microbatch, or nothing.
    """

    both: Sequence[Timeline]
    words: Words
    left: float
    width: float
    end: float
    row: float
    labels: _Labels
    shades: Mapping[int, tuple[int, int]]

    @property
    def right(self) -> float:
        return self.width - _BESIDE

    def x(self, time: float) -> float:
        return self.left + time / self.end * (self.right - self.left)


def lay_out_timeline(
    timeline: Timeline, words: Words, *, measured: Timeline | None = None
) -> Scene:
    """The picture of a timeline; with `measured`, a second row below each rank's first."""
    frame = _frame([timeline] if measured is None else [timeline, measured], words)
    items, y = _heading(frame)
    rows, bottom = _rows(frame, y)
    items += _axis(frame, y, bottom)
    items += rows
    bottom += 20
    if any(any(line.memory) for line in frame.both):
        curves, bottom = _memory(frame, bottom)
        items += curves
    return Scene(frame.width, bottom + 6, tuple(items), words.title or "timeline")


def _frame(both: Sequence[Timeline], words: Words) -> _Frame:
    end = max(line.makespan for line in both) or 1.0
    num_ranks = both[0].num_ranks
    names = [f"rank {num_ranks - 1}", *(["measured"] if len(both) > 1 else [])]
    left = _MARGIN + 8 + max(text_width(name, _TEXT) for name in names)
    row = _by_ranks(num_ranks, 28.0, 20.0, 14.0) * (1 if len(both) == 1 else 0.8)
    labels, width = _labels(both[0], row, end, left)
    stages = shades(span for line in both for span in line.spans)
    return _Frame(both, words, left, width, end, row, labels, stages)


def _by_ranks(num_ranks: int, few: float, some: float, many: float) -> float:
    return few if num_ranks <= 12 else some if num_ranks <= 32 else many


def _labels(timeline: Timeline, row: float, end: float, left: float) -> tuple[_Labels, float]:
    """What boxes say, and how wide the picture is.

    As much as fits in nearly all boxes, in a picture of a reasonable width.
    """
    size = _label_size(row)
    boxes = [
        (part, span.end - span.start)
        for span in timeline.spans
        if span.is_compute and span.end > span.start
        for part in span.action.each
    ]
    if not boxes:
        return "none", _NARROWEST
    styles: tuple[_Labels, ...] = ("letters", "numbers")
    for style in styles:
        scales = sorted((text_width(_label_of(p, style), size) + 3.5) / time for p, time in boxes)
        # A few boxes of a measured step may be too short for any label.
        needed = scales[int(0.95 * (len(scales) - 1))] * end + left + _BESIDE
        if needed <= _WIDEST:
            return style, max(_NARROWEST, needed)
    return "none", 1480.0


def _label_of(action: Action, labels: _Labels) -> str:
    """Such as F3, or 3; nothing for an action of no microbatch."""
    if action.microbatch is None or labels == "none":
        return ""
    return f"{LOOKS[action.kind].letter if labels == 'letters' else ''}{action.microbatch}"


def _label_size(height: float) -> float:
    """The size of the text in a box of a row."""
    return min(11.0, height * (1 - _FOOT) - 2, 5.0 + height / 5)


# Heading


def _heading(frame: _Frame) -> tuple[list[Item], float]:
    """Title, figures and legend; and where they end."""
    items: list[Item] = []
    y = _MARGIN + 12
    room = frame.width - 2 * _MARGIN
    if frame.words.title:
        title = fit_text(frame.words.title, _TITLE, room, bold=True)
        items.append(Label(_MARGIN, y, title, _TITLE, LIGHT.ink, bold=True))
        y += 19
    for line in _wrap(_figures(frame), room):
        items.append(Label(_MARGIN, y, line, _TEXT, LIGHT.muted))
        y += 16
    y += 5
    x = _MARGIN
    for kind, name in _legend(frame):
        taken = 22 + text_width(name, _TEXT)
        if x + taken > frame.width - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + 18
        items += _swatch(kind, x, y - 10)
        items.append(Label(x + 21, y, fit_text(name, _TEXT, room - 21), _TEXT, LIGHT.ink))
        x += taken + 14
    return items, y + 14


def _figures(frame: _Frame) -> list[str]:
    figures = []
    for line, what in zip(frame.both, ("simulated ", "measured "), strict=False):
        first, *rest = frame.words.figures(line)
        figures += [f"{what}{first}" if len(frame.both) > 1 else first, *rest]
    return figures


def _wrap(parts: Sequence[str], room: float) -> Iterator[str]:
    line = ""
    for part in parts:
        longer = f"{line}  ·  {part}" if line else part
        if line and text_width(longer, _TEXT) > room:
            yield fit_text(line, _TEXT, room)
            longer = part
        line = longer
    if line:
        yield fit_text(line, _TEXT, room)


def _legend(frame: _Frame) -> Iterator[tuple[Kind | None, str]]:
    found = {
        part.kind
        for line in frame.both
        for span in line.spans
        if span.is_compute or runs_beside(span)
        for part in span.action.each
    }
    for kind in sorted(found):
        if kind.is_transfer:
            if kind in TRANSFERS:
                yield kind, TRANSFERS[kind]
        else:
            yield kind, f"{LOOKS[kind].letter}  {LOOKS[kind].name}"
    if max((count for _, count in frame.shades.values()), default=1) > 1:
        yield None, "first to last stage of a rank"


def _swatch(kind: Kind | None, x: float, y: float) -> Iterator[Item]:
    if kind is None:
        yield from (Box(x + 4 * i, y, 4, 12, shade(Kind.FORWARD, i, 4)) for i in range(4))
    elif kind.is_compute:
        yield from _draw_box(Action(kind, 0), (x, y, 17, 12), "")
    else:
        yield _draw_arrow(kind, (x, y + 3, 16, _LANE), "")


# Rows


def _rows(frame: _Frame, y: float) -> tuple[list[Item], float]:
    """The rows of all ranks, and where they end."""
    rows: list[Item] = []
    height = frame.row
    for rank in range(frame.both[0].num_ranks):
        for index, line in enumerate(frame.both):
            spans = line.of_rank(rank)
            name = "measured" if index else f"rank {rank}"
            ink = LIGHT.muted if index else LIGHT.ink
            base = y + height / 2 + 4
            rows.append(Label(frame.left - 8, base, name, _TEXT, ink, "end"))
            idle = f"{line.idle_per_rank[rank]:.0%} idle"
            rows.append(Label(frame.right + 8, base, idle, _SMALL, LIGHT.muted))
            rows.append(Box(frame.left, y, frame.right - frame.left, height, LIGHT.idle))
            for span in spans:
                if span.is_compute:
                    rows += _draw_compute(span, frame, y)
            y += height + 2
            beside = list(filter(runs_beside, spans))
            lanes = number_lanes(beside, lambda span: span.rank)
            order = sorted(zip(lanes, beside, strict=True), key=lambda pair: (pair[0], pair[1][2:]))
            for lane, span in order:
                left, right = frame.x(span.start), frame.x(span.end)
                place = (left, y + lane * (_LANE + 1), right - left, _LANE)
                rows.append(_draw_arrow(span.action.kind, place, _tip_of(span, frame.words)))
            y += (max(lanes, default=-1) + 1) * (_LANE + 1)
        y += 5 if height > 14 else 2
    return rows, y


def _draw_compute(span: Span, frame: _Frame, y: float) -> Iterator[Item]:
    """One box, or one above the other for what runs at the same time."""
    left, right = frame.x(span.start), frame.x(span.end)
    parts = span.action.each
    height = (frame.row - len(parts) + 1) / len(parts)
    for index, part in enumerate(parts):
        place = (left, y + index * (height + 1), right - left, height)
        shades = frame.shades.get(part.stage, (0, 1))
        yield from _draw_box(part, place, _tip_of(span, frame.words), frame.labels, shades)


def _draw_box(
    action: Action,
    place: _Place,
    tip: str,
    labels: _Labels = "letters",
    shades: tuple[int, int] = (0, 1),
) -> Iterator[Item]:
    """A box for a compute action at (x, y, width, height), with its label if that fits."""
    x, y, width, height = place
    if width <= 0:
        return
    if width > 3:
        width -= 0.8  # lets neighbours be seen as two
    look = LOOKS[action.kind]
    yield Box(x, y, width, height, shade(action.kind, *shades), tip=tip)
    foot = height * _FOOT
    if look.hatch:
        yield Box(x, y + height - foot, width, foot, "", hatch=look.hatch)
    text, size = _label_of(action, labels), _label_size(height)
    if text and size >= 7 and text_width(text, size) + 2 <= width:
        base = y + (height - foot) / 2 + 0.36 * size
        yield Label(x + width / 2, base, text, size, ON_COLOUR, "middle")


def _draw_arrow(kind: Kind, place: _Place, tip: str) -> Item:
    """A transfer points where its value goes: forwards or back. The rest is a bar."""
    x, y, width, height = place
    look = LOOKS[kind]
    width = max(width, 2.5)
    if not kind.is_transfer:
        return Box(x, y, width, height, look.colour, hatch=look.hatch, tip=tip)
    point = min(height / 2, width / 2)
    middle, bottom, right = y + height / 2, y + height, x + width
    fill = look.colour if kind.is_send else lighten(look.colour, 0.5)
    points: tuple[tuple[float, float], ...]
    if kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION):
        points = ((x, y), (right - point, y), (right, middle), (right - point, bottom), (x, bottom))
    else:
        points = ((right, y), (x + point, y), (x, middle), (x + point, bottom), (right, bottom))
    return Area(points, fill, look.hatch, tip)


def _tip_of(span: Span, words: Words) -> str:
    """What a reader gets to see of an action when pointing at it."""
    lines = []
    for action in span.action.each:
        text = f"{action}: {LOOKS[action.kind].name}, stage {action.stage}"
        if action.microbatch is not None:
            text += f", microbatch {action.microbatch}"
        if action.kind.is_transfer:
            text += f", {'to' if action.kind.is_send else 'from'} stage {action.peer}"
        lines.append(text)
    took = words.time(span.end - span.start)
    lines.append(f"rank {span.rank}, from {words.time(span.start)}, takes {took}")
    return "\n".join(lines)


def _axis(frame: _Frame, top: float, bottom: float) -> Iterator[Item]:
    for time in nice_ticks(frame.end, int((frame.right - frame.left) / 70)):
        x = frame.x(time)
        yield Line(((x, top - 3), (x, bottom + 2)), LIGHT.rule, 0.8)
        yield Label(x, bottom + 13, number_text(time), _SMALL, LIGHT.muted, "middle")
    name = f"time, {frame.words.time_unit}" if frame.words.time_unit else "time"
    text = fit_text(name, _SMALL, _BESIDE - 8 - 4)
    yield Label(frame.right + 8, bottom + 13, text, _SMALL, LIGHT.muted)


# Memory


def _memory(frame: _Frame, y: float) -> tuple[list[Item], float]:
    """One strip per rank, all to the same scale; a measured curve is a line over it."""
    items: list[Item] = []
    y += 12
    items.append(Label(frame.left, y, "memory held", _TEXT, LIGHT.ink))
    y += 7
    most = max((peak for line in frame.both for peak in line.peak_memory), default=0.0) or 1.0
    num_ranks = frame.both[0].num_ranks
    height = _by_ranks(num_ranks, 24.0, 16.0, 12.0)
    for rank in range(num_ranks):
        base = y + height
        items.append(Label(frame.left - 8, base - 3, f"rank {rank}", _TEXT, LIGHT.ink, "end"))
        peaks = []
        for index, line in enumerate(frame.both):
            if not line.memory or not line.memory[rank]:
                continue
            peaks.append(line.peak_memory[rank])
            points = tuple(
                (frame.x(time), base - held / most * height)
                for time, held in _steps(line.memory[rank], frame.end)
            )
            if index == 0:
                floor = ((points[-1][0], base), (points[0][0], base))
                items.append(Area((*points, *floor), LIGHT.area))
            dash = "4 2" if index else ""
            items.append(Line(points, LIGHT.ink if index else LIGHT.accent, 1.2, dash))
        items.append(Line(((frame.left, base), (frame.right, base)), LIGHT.rule, 1.0))
        if peaks:
            text = fit_text(f"peak {frame.words.memory(max(peaks))}", _SMALL, _BESIDE - 8 - 2)
            items.append(Label(frame.right + 8, base - 3, text, _SMALL, LIGHT.muted))
        y = base + 6
    return items, y


def _steps(curve: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """The corners of a curve that keeps each value until the next one."""
    corners = [(curve[0][0], 0.0)]
    for time, held in curve:
        corners += [(time, corners[-1][1]), (time, held)]
    corners.append((end, corners[-1][1]))
    return corners
