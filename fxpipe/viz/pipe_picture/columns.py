"""Lay out a pipe as columns of stage boxes, each feeding the one below it.

In:  an `Outline`.
Out: a `Scene`.

The first column goes down, then the next one begins at the top. What a stage sends to
the next stands beside the arrow between them. A skip within a column, also one past the
first module of the next stage, runs down a lane on the right, and so does a tie.
What would run between columns, or to many stages, is a letter in the boxes and a line in
the list at the foot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxpipe.viz.palette import LIGHT
from fxpipe.viz.pipe_picture.links import Letters, draw_lanes, find_lanes, give_letters
from fxpipe.viz.pipe_picture.outline import Crossing, Outline
from fxpipe.viz.pipe_picture.stage_box import StageBox, draw_stage, stage_width
from fxpipe.viz.scene import (
    Item,
    Label,
    Line,
    Scene,
    fit_text,
    label_extent,
    moved,
    text_width,
)

__all__ = ["lay_out_pipe"]

_MARGIN = 18.0
_TEXT, _TITLE = 9.5, 15.0
_STEP = 13.0
_ARROW_X = 22.0
_GUTTER = 34.0
_LONGEST = 6
_WIDEST_LABEL = 420.0


def lay_out_pipe(outline: Outline, *, title: str = "") -> Scene:
    """The picture of a pipe."""
    columns = _split_into_columns(outline)
    letters = give_letters(
        outline, {stage: index for index, column in enumerate(columns) for stage in column}
    )
    boxes = _draw_boxes(outline, letters)
    top = _MARGIN
    items: list[Item] = []
    if title:
        items.append(Label(_MARGIN, top + 12, title, _TITLE, LIGHT.ink, bold=True))
        top += 20
    summary = f"{outline.summary}; a full bar is the heaviest stage"
    items.append(Label(_MARGIN, top + 10, summary, _TEXT, LIGHT.muted))
    top += 22
    drawn = [
        _draw_column(outline, boxes, _place(outline, boxes, column, top, len(columns)), letters)
        for column in columns
    ]
    x = _MARGIN
    for index, column in enumerate(drawn):
        items += (moved(item, x, 0) for item in column.items)
        right = x + column.width
        if index + 1 < len(drawn):
            items += _wrap(x, column, right + _GUTTER, top)
            x = right + _GUTTER
    bottom = max(column.bottom for column in drawn) + 4
    for line in letters.lines:
        bottom += _STEP + 1
        items.append(Label(_MARGIN, bottom, line, _TEXT, LIGHT.skip))
    width = max(right, *(label_extent(item)[2] for item in items if isinstance(item, Label)))
    name = title or "pipe"
    return Scene(width + _MARGIN, bottom + _MARGIN, tuple(items), name)


def _split_into_columns(outline: Outline) -> list[range]:
    """Columns for a page that is somewhat wider than high."""
    count = len(outline.stages)
    has_skips = any(crossing.is_skip for crossing in outline.crossings)
    if count <= (2 * _LONGEST if has_skips else _LONGEST):
        return [range(count)]
    boxes = _draw_boxes(outline, Letters())
    height = _place(outline, boxes, range(count), 0, 1).bottom
    number = max(1, round(math.sqrt(1.8 * height / (boxes[0].width + _GUTTER))))
    length, longer = divmod(count, number)
    ends = [index * length + min(index, longer) for index in range(number + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _draw_boxes(outline: Outline, letters: Letters) -> list[StageBox]:
    reads = [letters.reads.get(stage.index, ()) for stage in outline.stages]
    sends = [letters.sends.get(stage.index, ()) for stage in outline.stages]
    width = max(
        stage_width(outline, stage, (*reads[stage.index], *sends[stage.index]))
        for stage in outline.stages
    )
    return [
        draw_stage(outline, stage, width, reads=reads[stage.index], sends=sends[stage.index])
        for stage in outline.stages
    ]


@dataclass(frozen=True, slots=True)
class _Placed:
    """The heights of a column's boxes, and where the arrow out of the last one ends."""

    stages: range
    tops: Mapping[int, float]
    bottom: float


def _place(
    outline: Outline, boxes: Sequence[StageBox], column: range, top: float, num_columns: int
) -> _Placed:
    y = top + (18 if num_columns > 1 else 0)
    tops: dict[int, float] = {}
    for stage in column:
        tops[stage] = y
        y += boxes[stage].height
        if stage + 1 < len(boxes):
            lines = _sent_to_next(outline, stage, boxes[stage].width, column)
            y += 14.0 + max(1, len(lines)) * _STEP
    return _Placed(column, tops, y)


def _has_lane(outline: Outline, crossing: Crossing, column: range) -> Crossing | None:
    """The part of a crossing that runs down a lane: a skip, also one into the next stage."""
    if crossing.is_skip:
        return crossing
    is_shown = outline.depth != "stages" and crossing.target in column
    return crossing.past_first() if is_shown else None


def _sent_to_next(outline: Outline, stage: int, width: float, column: range) -> list[str]:
    """What stands beside the arrow to the next stage; long lines are broken in two."""
    lines: list[str] = []
    for crossing in outline.crossings:
        lane = _has_lane(outline, crossing, column)
        is_whole = lane is not None and lane.target_parts == crossing.target_parts
        if crossing.source != stage or crossing.is_skip or is_whole:
            continue
        whole = "  ".join(crossing.lines)
        fits = text_width(whole, _TEXT) <= width - _ARROW_X - 10
        lines += [whole] if fits else crossing.lines
    return [fit_text(line, _TEXT, _WIDEST_LABEL) for line in lines]


@dataclass(frozen=True, slots=True)
class _Column:
    """A drawn column with its left side at 0."""

    items: tuple[Item, ...]
    width: float
    last_box: float
    bottom: float


def _draw_column(
    outline: Outline,
    boxes: Sequence[StageBox],
    placed: _Placed,
    letters: Letters,
) -> _Column:
    items: list[Item] = []
    width = boxes[0].width
    for stage, top in placed.tops.items():
        items += (moved(item, 0, top) for item in boxes[stage].items)
        y = top + boxes[stage].height
        lines = _sent_to_next(outline, stage, boxes[stage].width, placed.stages)
        for index, text in enumerate(lines):
            base = y + 7 + (index + 0.75) * _STEP
            items.append(Label(_ARROW_X + 10, base, text, _TEXT, LIGHT.muted))
            width = max(width, _ARROW_X + 10 + text_width(text, _TEXT))
        if lines and stage + 1 in placed.tops:
            points = ((_ARROW_X, y), (_ARROW_X, placed.tops[stage + 1]))
            items.append(Line(points, LIGHT.muted, 1.2, arrow=True))
    lanes = list(
        find_lanes(
            [
                lane
                for crossing in outline.crossings
                if crossing.source in placed.tops and crossing not in letters.crossings
                if (lane := _has_lane(outline, crossing, placed.stages)) is not None
            ],
            [
                tie
                for tie in outline.ties
                if tie not in letters.ties and tie.places[0][0] in placed.tops
            ],
            boxes,
            placed.tops,
        )
    )
    if lanes:
        drawn, width = draw_lanes(lanes, width)
        items += drawn
    labels = [label_extent(item)[3] for item in items if isinstance(item, Label)]
    return _Column(tuple(items), width, y, max(placed.bottom, *labels))


def _wrap(x: float, column: _Column, next_x: float, top: float) -> list[Item]:
    """The arrow from the foot of a column to the head of the next."""
    gutter, start = next_x - _GUTTER / 2, column.bottom
    points = (
        (x + _ARROW_X, column.last_box),
        (x + _ARROW_X, start),
        (gutter, start),
        (gutter, top),
        (next_x + _ARROW_X, top),
        (next_x + _ARROW_X, top + 18),
    )
    return [Line(points, LIGHT.muted, 1.2, arrow=True)]
