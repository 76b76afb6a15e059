"""Draw one stage of a pipe as a box: its name and load, then a row for each part.

In:  a `StageOutline`.
Out: items with the box's corner at (0, 0), and where its parts are, for lines to them.

Parts stand in order of execution. A part that reads the one above it has an arrow
between them; what it reads from further up comes along the left side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.viz.palette import LIGHT
from fxpipe.viz.pipe_picture.outline import Outline, StageOutline
from fxpipe.viz.pipe_picture.parts import Part
from fxpipe.viz.scene import Box, Item, Label, Line, fit_text, text_width

__all__ = ["StageBox", "draw_stage", "pack_intervals", "stage_width"]

_PAD = 12.0
_NAME, _TEXT, _NOTE = 12.5, 10.5, 9.0
_ROW, _GAP, _PLAIN_ROW = 22.0, 13.0, 15.5
_LANE = 7.0
_WIDEST, _NARROWEST = 380.0, 190.0
_MOST_ROWS = 14


@dataclass(frozen=True, slots=True)
class StageBox:
    """A drawn stage; `parts` has the middle of each part's box, if parts have boxes."""

    width: float
    height: float
    items: tuple[Item, ...]
    parts: tuple[float, ...]

    @property
    def parts_right(self) -> float:
        return self.width - _PAD


def stage_width(outline: Outline, stage: StageOutline, notes: Iterable[str]) -> float:
    """How wide a box must be for all its text, within reason."""
    arcs = [] if outline.depth == "stages" else _arcs(stage.parts)
    lanes = max(pack_intervals(arcs), default=-1) + 1
    widths = [
        text_width(f"stage {stage.index}", _NAME, bold=True)
        + text_width(_share(outline, stage), _NOTE)
        + 16,
        text_width(stage.facts, _NOTE),
        *(text_width(text, _NOTE) for text in (*notes, *(f"→ {end.text}" for end in stage.inputs))),
        *(text_width(f"{end.text} →", _NOTE) for end in stage.outputs),
        *(
            text_width(part.title, _TEXT) + text_width(part.note, _NOTE) + 30 + lanes * _LANE
            for part in stage.parts
        ),
    ]
    return min(_WIDEST, max(_NARROWEST, max(widths) + 2 * _PAD))


def draw_stage(
    outline: Outline,
    stage: StageOutline,
    width: float,
    *,
    reads: Sequence[str] = (),
    sends: Sequence[str] = (),
) -> StageBox:
    """Draw a stage; `reads` and `sends` are lines on what comes and goes out of sight."""
    items: list[Item] = []
    y = _add_heading(items, outline, stage, width)
    room = width - 2 * _PAD
    for end in stage.inputs:
        y = _add_line(items, f"→ {end.text}", room, y, LIGHT.accent)
    for text in reads:
        y = _add_line(items, text, room, y, LIGHT.skip)
    y += 3
    add_parts = _add_rows if outline.depth == "stages" else _add_blocks
    centres, y = add_parts(items, stage.parts, width, y)
    for text in sends:
        y = _add_line(items, text, room, y, LIGHT.skip)
    for end in stage.outputs:
        y = _add_line(items, f"{end.text} →", room, y, LIGHT.accent)
    height = y + 7
    frame = Box(0, 0, width, height, LIGHT.fill, LIGHT.rule, 1.0, radius=7)
    return StageBox(width, height, (frame, *items), tuple(centres))


def _add_heading(items: list[Item], outline: Outline, stage: StageOutline, width: float) -> float:
    items.append(Label(_PAD, 20, f"stage {stage.index}", _NAME, LIGHT.ink, bold=True))
    right = width - _PAD
    items.append(Label(right, 20, _share(outline, stage), _NOTE, LIGHT.muted, "end"))
    room = width - 2 * _PAD
    heaviest = max(other.share for other in outline.stages) or 1.0
    items.append(Box(_PAD, 27, room, 4, LIGHT.idle, radius=2))
    items.append(Box(_PAD, 27, max(room * stage.share / heaviest, 2), 4, LIGHT.bar, radius=2))
    return _add_line(items, stage.facts, room, 34, LIGHT.muted)


def _add_line(items: list[Item], text: str, room: float, y: float, colour: str) -> float:
    items.append(Label(_PAD, y + 10, fit_text(text, _NOTE, room), _NOTE, colour))
    return y + 14


def _share(outline: Outline, stage: StageOutline) -> str:
    return f"{stage.share:.1%} of {outline.load}"


def _add_rows(
    items: list[Item], parts: Sequence[Part], width: float, y: float
) -> tuple[list[float], float]:
    """Parts as plain lines of text; too many end with a count."""
    shown = parts if len(parts) <= _MOST_ROWS else parts[: _MOST_ROWS - 1]
    for part in shown:
        _add_part_text(items, part, _PAD, width - _PAD, y + _PLAIN_ROW / 2)
        y += _PLAIN_ROW
    if len(shown) < len(parts):
        text = f"… and {len(parts) - len(shown)} more"
        y = _add_line(items, text, width - 2 * _PAD, y, LIGHT.muted)
    return [], y


def _add_part_text(items: list[Item], part: Part, left: float, right: float, middle: float) -> None:
    room = right - left
    title = fit_text(part.title, _TEXT, room)
    items.append(Label(left, middle + 3.6, title, _TEXT, LIGHT.ink))
    rest = room - text_width(title, _TEXT) - 8
    note = fit_text(part.note, _NOTE, rest) if rest > 30 else ""
    if note:
        items.append(Label(right, middle + 3.6, note, _NOTE, LIGHT.muted, "end"))


def _add_blocks(
    items: list[Item], parts: Sequence[Part], width: float, y: float
) -> tuple[list[float], float]:
    """Parts as boxes with arrows between them."""
    y += 3
    arcs = _arcs(parts)
    lanes = pack_intervals(arcs)
    left = _PAD + (max(lanes, default=-1) + 1) * _LANE
    centres = [y + index * (_ROW + _GAP) + _ROW / 2 for index in range(len(parts))]
    for index, part in enumerate(parts):
        top = centres[index] - _ROW / 2
        place = (left, top, width - _PAD - left, _ROW)
        items.append(Box(*place, LIGHT.paper, LIGHT.rule, 1.0, radius=5))
        _add_part_text(items, part, left + 8, width - _PAD - 8, centres[index])
        if index - 1 in part.reads:
            x = (left + width - _PAD) / 2
            points = ((x, top - _GAP + 0.5), (x, top - 0.5))
            items.append(Line(points, LIGHT.muted, 1.0, arrow=True))
    for lane, (source, target) in zip(lanes, arcs, strict=True):
        x = left - (lane + 1) * _LANE + 1
        # Leave below the middle and arrive above it, so that both can be told apart.
        low, high = centres[source] + 5, centres[target] - 5
        around = ((left, low), (x, low), (x, high), (left, high))
        items.append(Line(around, LIGHT.muted, 1.0, arrow=True))
    return centres, (centres[-1] + _ROW / 2 + 5 if parts else y)


def _arcs(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Reads from further up than the part before, as (source, target)."""
    return [
        (read, index) for index, part in enumerate(parts) for read in part.reads if read < index - 1
    ]


def pack_intervals(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each interval, the first lanes for short ones; in a lane none touches another."""
    used: list[list[tuple[float, float]]] = []
    found = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i][1] - intervals[i][0]):
        start, end = intervals[index]
        free = (
            lane
            for lane, others in enumerate(used)
            if all(end < other[0] or other[1] < start for other in others)
        )
        found[index] = next(free, len(used))
        if found[index] == len(used):
            used.append([])
        used[found[index]].append((start, end))
    return found
