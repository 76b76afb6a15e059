"""Show skips and ties: as lines beside a column of boxes, or as letters.

Each line leaves a box on the right, runs down a lane of its own and comes back. Lanes
of long lines are further out. All labels stand right of all lanes, at a height where
their line passes, so no label is crossed by a line.

What cannot be drawn as a line has a letter: a value that goes to many stages, or from one column of
the picture to another, and parameters tied between columns. Boxes say "reads A" and "sends A", and
a list says what A is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from fxpipe.viz.palette import LIGHT
from fxpipe.viz.pipe_picture.outline import Crossing, Outline, Tie, ranges_text
from fxpipe.viz.pipe_picture.stage_box import StageBox, pack_intervals
from fxpipe.viz.scene import Box, Item, Label, Line, fit_text, text_width

__all__ = ["Lane", "Letters", "draw_lanes", "find_lanes", "give_letters"]

_LANE = 9.0
_TEXT = 9.5
_STEP = 13.0
_WIDEST_LABEL = 420.0


Anchor = tuple[float, float]
"""A point (x, y) on a box or on a part in it."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A line from one point to others, and what it says."""

    start: Anchor
    ends: tuple[Anchor, ...]
    lines: tuple[str, ...]
    colour: str
    is_tie: bool

    @property
    def top(self) -> float:
        return min(self.start[1], *(y for _, y in self.ends))

    @property
    def bottom(self) -> float:
        return max(self.start[1], *(y for _, y in self.ends))


def find_lanes(
    crossings: Sequence[Crossing],
    ties: Sequence[Tie],
    boxes: Sequence[StageBox],
    tops: Mapping[int, float],
) -> Iterator[Lane]:
    """The lanes of a column whose boxes start at the heights `tops`."""
    anchor = _anchors(boxes, tops)
    values: dict[tuple[int, str], list[Crossing]] = {}
    for crossing in crossings:
        values.setdefault((crossing.source, crossing.name), []).append(crossing)
    for same in values.values():
        first = same[0]
        start = anchor(first.source, first.source_part)
        ends = tuple(
            anchor(crossing.target, part)
            for crossing in same
            for part in crossing.target_parts or (None,)
        )
        yield Lane(start, ends, first.lines, LIGHT.skip, False)
    for tie in ties:
        start, *ends_at = (anchor(stage, part) for stage, part, _ in tie.places)
        names = tuple(name for _, _, name in tie.places)
        yield Lane(start, tuple(ends_at), ("tied", *names), LIGHT.tied, True)


def _anchors(
    boxes: Sequence[StageBox], tops: Mapping[int, float]
) -> Callable[[int, int | None], Anchor]:
    """Points on the right side of boxes and parts, no two at one height."""
    taken: set[float] = set()

    def anchor(stage: int, part: int | None) -> Anchor:
        box, top = boxes[stage], tops[stage]
        x, middle = box.width, top + box.height / 2
        if box.parts:
            middle = top + (16.0 if part is None else box.parts[part])
            x = box.width if part is None else box.parts_right
        for offset in (0, 5, -5, 10, -10, 15, -15, 20, -20):
            y = middle + offset
            if y not in taken and top < y < top + box.height:
                taken.add(y)
                return x, y
        return x, middle

    return anchor


def draw_lanes(lanes: Sequence[Lane], left: float) -> tuple[list[Item], float]:
    """Draw lanes right of `left`; returns the items and where the last label ends."""
    places = pack_intervals([(lane.top - 4, lane.bottom + 4) for lane in lanes])
    right = left + 10 + (max(places) + 1) * _LANE
    items: list[Item] = []
    labels: list[Item] = []
    taken: list[tuple[float, float]] = []
    width = right
    for lane, place in zip(lanes, places, strict=True):
        x = left + 10 + place * _LANE
        dash = "1.5 2.5" if lane.is_tie else "5 3"
        start = lane.start
        for end in sorted(lane.ends, key=lambda end: end[1]):
            points = (start, (x, start[1]), (x, end[1]), end)
            items.append(Line(points, lane.colour, 1.3, dash, arrow=not lane.is_tie))
            start = (x, end[1])  # the next one branches off here
        if lane.is_tie:
            knobs = (lane.start, *lane.ends)
            items += (Box(x - 2.5, y - 2.5, 5, 5, lane.colour, radius=2.5) for x, y in knobs)
        y = _free_height(lane, taken)
        taken.append((y, y + len(lane.lines) * _STEP))
        labels.append(Line(((x, y), (right + 2, y)), lane.colour, 0.8, "1 2"))
        for index, line in enumerate(lane.lines):
            text = fit_text(line, _TEXT, _WIDEST_LABEL)
            base = y + 3.3 + index * _STEP
            labels.append(Label(right + 5, base, text, _TEXT, lane.colour))
            width = max(width, right + 5 + text_width(text, _TEXT))
    return [*items, *labels], width


def _free_height(lane: Lane, taken: Sequence[tuple[float, float]]) -> float:
    """A height that the line passes, for a label; below all others if there is none free."""
    needed = len(lane.lines) * _STEP
    y = lane.top
    while any(y < bottom and top < y + needed for top, bottom in taken):
        y += 1.0
    return y if y <= lane.bottom else max(bottom for _, bottom in taken)


@dataclass(frozen=True, slots=True)
class Letters:
    """Which crossings and ties have letters, and the lines that say so.

    `reads` and `sends` have lines for the boxes of stages, `lines` is the list.
    """

    crossings: frozenset[Crossing] = frozenset()
    ties: frozenset[Tie] = frozenset()
    reads: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sends: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def give_letters(outline: Outline, column_of: Mapping[int, int]) -> Letters:
    """Give letters to all that is shared or changes column, except from a stage to the next."""
    lines: list[str] = []
    reads: dict[int, list[str]] = {}
    sends: dict[int, list[str]] = {}
    tied: dict[int, list[str]] = {}
    far = [
        crossing
        for crossing in outline.crossings
        if crossing.is_skip and column_of[crossing.source] != column_of[crossing.target]
    ]
    values: dict[tuple[int, str], tuple[str, list[int]]] = {}
    for crossing in (*chain.from_iterable(outline.shared), *far):
        text = "  ".join(crossing.lines)
        values.setdefault((crossing.source, crossing.name), (text, []))[1].append(crossing.target)
    for (source, _), (text, targets) in values.items():
        letter = _letter(len(lines))
        lines.append(f"{letter}   {text}, from stage {source} to {ranges_text(targets)}")
        sends.setdefault(source, []).append(letter)
        for target in targets:
            reads.setdefault(target, []).append(letter)
    ties = [tie for tie in outline.ties if len({column_of[s] for s, _, _ in tie.places}) > 1]
    for tie in ties:
        letter = _letter(len(lines))
        places = " = ".join(f"{name} (stage {stage})" for stage, _, name in tie.places)
        lines.append(f"{letter}   tied: {places}")
        for stage, _, _ in tie.places:
            tied.setdefault(stage, []).append(letter)
    return Letters(
        frozenset(far),
        frozenset(ties),
        {stage: (f"reads {', '.join(found)}",) for stage, found in reads.items()},
        {
            stage: tuple(
                f"{verb} {', '.join(found[stage])}"
                for verb, found in (("sends", sends), ("tied", tied))
                if stage in found
            )
            for stage in {*sends, *tied}
        },
        tuple(lines),
    )


def _letter(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
