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

A transfer has a lane of its own below its rank's boxes, since it runs beside compute;
transfers that overlap in time get as many lanes as they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.program import Action, Kind, Span, Timeline
from fxpipe.text import number_text
from fxpipe.viz.numbers import PLAIN, Unit, nice_ticks
from fxpipe.viz.palette import LIGHT, LOOKS, shade, shades
from fxpipe.viz.scene import Area, Box, Item, Label, Line, Scene, fit_text, text_width
from fxpipe.viz.timeline_picture.spans import (
    Frame,
    Labels,
    draw_box,
    draw_span,
    label_of,
    label_size,
    pack_lanes,
)

__all__ = ["Options", "lay_out_timeline"]

_MARGIN = 16.0
_LANE = 7.0
_TITLE, _TEXT, _SMALL = 15.0, 11.0, 10.0
_NARROWEST, _WIDEST = 860.0, 2200.0


@dataclass(frozen=True, slots=True)
class Options:
    """The title of a timeline's picture, and its units."""

    title: str = ""
    time: Unit = PLAIN
    memory: Unit = PLAIN


def lay_out_timeline(
    timeline: Timeline, options: Options, *, measured: Timeline | None = None
) -> Scene:
    """The picture of a timeline; with `measured`, a second row below each rank's first."""
    both = [timeline] if measured is None else [timeline, measured]
    frame = _frame(both, options)
    width = frame.right + 78
    items, y = _heading(both, options, frame, width)
    rows, bottom = _rows(both, frame, y)
    items += _axis(frame, y, bottom)
    items += rows
    bottom += 20
    if any(any(line.memory) for line in both):
        curves, bottom = _memory(both, options, frame, bottom)
        items += curves
    return Scene(width, bottom + 6, tuple(items), options.title or "timeline")


def _frame(both: Sequence[Timeline], options: Options) -> Frame:
    end = max(line.makespan for line in both) or 1.0
    names = [f"rank {both[0].num_ranks - 1}", *(["measured"] if len(both) > 1 else [])]
    left = _MARGIN + 8 + max(text_width(name, _TEXT) for name in names)
    labels, width = _labels(both, end, left)
    return Frame(
        left=left,
        plot=width - left - 78,
        end=end,
        shades=shades(span for line in both for span in line.spans),
        time=options.time,
        labels=labels,
    )


def _labels(both: Sequence[Timeline], end: float, left: float) -> tuple[Labels, float]:
    """What boxes say, all alike, and how wide the picture is.

    As much as fits in nearly all boxes, in a picture of a reasonable width.
    """
    size = label_size(_row_height(both))
    boxes = [
        (part, span.end - span.start)
        for span in both[0].spans
        if span.is_compute and span.end > span.start
        for part in span.action.parts or (span.action,)
    ]
    styles: tuple[Labels, ...] = ("letters", "numbers")
    for style in styles:
        scales = sorted((text_width(label_of(p, style), size) + 3.5) / time for p, time in boxes)
        if not scales:
            break
        # A few boxes of a measured step may be too short for any label.
        needed = scales[int(0.95 * (len(scales) - 1))] * end + left + 78
        if needed <= _WIDEST:
            return style, max(_NARROWEST, needed)
    return "none", 1480.0 if boxes else _NARROWEST


def _row_height(both: Sequence[Timeline]) -> float:
    num_ranks = both[0].num_ranks
    height = 28.0 if num_ranks <= 12 else 20.0 if num_ranks <= 32 else 14.0
    return height if len(both) == 1 else 0.8 * height


def _heading(
    both: Sequence[Timeline], options: Options, frame: Frame, width: float
) -> tuple[list[Item], float]:
    """Title, figures and legend; and where they end."""
    items: list[Item] = []
    y = _MARGIN + 12
    room = width - 2 * _MARGIN
    if options.title:
        title = fit_text(options.title, _TITLE, room, bold=True)
        items.append(Label(_MARGIN, y, title, _TITLE, LIGHT.ink, bold=True))
        y += 19
    for line in _wrap(_figures(both, options), room):
        items.append(Label(_MARGIN, y, line, _TEXT, LIGHT.muted))
        y += 16
    y += 5
    x = _MARGIN
    for kind, name in _legend(both, frame):
        taken = 22 + text_width(name, _TEXT)
        if x + taken > width - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + 18
        items += _swatch(kind, x, y - 10)
        items.append(Label(x + 21, y, fit_text(name, _TEXT, room - 21), _TEXT, LIGHT.ink))
        x += taken + 14
    return items, y + 14


def _figures(both: Sequence[Timeline], options: Options) -> list[str]:
    figures = []
    for line, what in zip(both, ("simulated ", "measured "), strict=False):
        what = what if len(both) > 1 else ""
        figures.append(f"{what}makespan {options.time.text(line.makespan)}")
        figures.append(f"idle {line.idle:.1%}")
        if any(line.peak_memory):
            figures.append(f"peak memory {options.memory.text(max(line.peak_memory))}")
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


_NAMES = {
    Kind.SEND_ACTIVATION: "activation, dark where sent, light where received",
    Kind.SEND_GRADIENT: "gradient",
}


def _legend(both: Sequence[Timeline], frame: Frame) -> Iterator[tuple[Kind | None, str]]:
    found = {
        part.kind
        for line in both
        for span in line.spans
        if span.is_compute or _has_lane(span)
        for part in span.action.parts or (span.action,)
    }
    for kind in sorted(found):
        if kind.is_transfer:
            if kind in _NAMES:
                yield kind, _NAMES[kind]
        else:
            yield kind, f"{LOOKS[kind].letter}  {LOOKS[kind].name}"
    if max((count for _, count in frame.shades.values()), default=1) > 1:
        yield None, "first to last stage of a rank"


def _swatch(kind: Kind | None, x: float, y: float) -> list[Item]:
    if kind is None:
        return [Box(x + 4 * i, y, 4, 12, shade(Kind.FORWARD, i, 4)) for i in range(4)]
    if kind.is_compute:
        return list(draw_box(Action(kind, 0), {}, (x, y, 17, 12)))
    span = Span(0, Action(kind, 0), 0, 1)
    drawn = draw_span(span, Frame(x, 16, 1, {}, PLAIN), y + 3, _LANE)
    return [replace(item, tip="") for item in drawn if isinstance(item, (Area, Box))]


def _has_lane(span: Span) -> bool:
    """Whether something that is not compute is drawn; what takes no time is not."""
    return not span.is_compute and span.end > span.start


def _rows(both: Sequence[Timeline], frame: Frame, y: float) -> tuple[list[Item], float]:
    """The rows of all ranks, and where they end."""
    num_ranks, height = both[0].num_ranks, _row_height(both)
    rows: list[Item] = []
    for rank in range(num_ranks):
        for index, line in enumerate(both):
            spans = line.of_rank(rank)
            name = "measured" if index else f"rank {rank}"
            ink = LIGHT.muted if index else LIGHT.ink
            base = y + height / 2 + 4
            rows.append(Label(frame.left - 8, base, name, _TEXT, ink, "end"))
            idle = f"{line.idle_per_rank[rank]:.0%} idle"
            rows.append(Label(frame.right + 8, base, idle, _SMALL, LIGHT.muted))
            rows.append(Box(frame.left, y, frame.plot, height, LIGHT.idle))
            for span in spans:
                if span.is_compute:
                    rows += draw_span(span, frame, y, height)
            y += height + 2
            for lane in pack_lanes(filter(_has_lane, spans)):
                for span in lane:
                    rows += draw_span(span, frame, y, _LANE)
                y += _LANE + 1
        y += 5 if height > 14 else 2
    return rows, y


def _axis(frame: Frame, top: float, bottom: float) -> Iterator[Item]:
    for time in nice_ticks(frame.end, int(frame.plot / 70)):
        x = frame.x(time)
        yield Line(((x, top - 3), (x, bottom + 2)), LIGHT.rule, 0.8)
        yield Label(x, bottom + 13, number_text(time), _SMALL, LIGHT.muted, "middle")
    name = f"time, {frame.time.name}" if frame.time.name else "time"
    room = 78 - 8 - 4
    yield Label(frame.right + 8, bottom + 13, fit_text(name, _SMALL, room), _SMALL, LIGHT.muted)


def _memory(
    both: Sequence[Timeline], options: Options, frame: Frame, y: float
) -> tuple[list[Item], float]:
    """One strip per rank, all to the same scale; a measured curve is a line over it."""
    items: list[Item] = []
    y += 12
    items.append(Label(frame.left, y, "memory held", _TEXT, LIGHT.ink))
    y += 7
    most = max((peak for line in both for peak in line.peak_memory), default=0.0) or 1.0
    num_ranks = both[0].num_ranks
    height = 24.0 if num_ranks <= 12 else 16.0 if num_ranks <= 32 else 12.0
    for rank in range(num_ranks):
        base = y + height
        items.append(Label(frame.left - 8, base - 3, f"rank {rank}", _TEXT, LIGHT.ink, "end"))
        for index, line in enumerate(both):
            if not line.memory or not line.memory[rank]:
                continue
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
        peaks = [line.peak_memory[rank] for line in both if any(line.memory) and line.memory[rank]]
        if peaks:
            text = fit_text(f"peak {options.memory.text(max(peaks))}", _SMALL, 78 - 8 - 2)
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
