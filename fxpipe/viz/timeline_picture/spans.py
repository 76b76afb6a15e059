"""Draw single actions of a timeline: boxes for compute, arrows for transfers.

Kinds differ in colour, letter and hatch; a pair of actions that run at the same
time is a box in two halves. A hatch covers the foot of a box only, below its label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fxpipe.program import Action, Edges, Kind, Span, Value, reads, writes
from fxpipe.viz.numbers import Unit
from fxpipe.viz.palette import LOOKS, ON_COLOUR, mix, shade
from fxpipe.viz.scene import Area, Box, Item, Label, text_width

__all__ = [
    "Frame",
    "Labels",
    "draw_box",
    "draw_span",
    "edges_or_chain",
    "find_dependencies",
    "label_of",
    "label_size",
    "pack_lanes",
    "tip_of",
]

_FOOT = 0.27

Labels = Literal["letters", "numbers", "none"]
"""What all boxes of a picture say: the action and the microbatch, the microbatch, nothing."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where time runs in a picture, and how stages are shaded."""

    left: float
    plot: float
    end: float
    shades: Mapping[int, tuple[int, int]]
    time: Unit
    labels: Labels = "letters"

    @property
    def right(self) -> float:
        return self.left + self.plot

    def x(self, time: float) -> float:
        return self.left + time / self.end * self.plot


def draw_span(span: Span, frame: Frame, y: float, height: float) -> Iterator[Item]:
    """The items of one action between two heights."""
    left, right = frame.x(span.start), frame.x(span.end)
    tip = tip_of(span, frame.time)
    if span.action.parts:
        half = (height - 1) / 2
        for index, part in enumerate(span.action.parts):
            top = y + index * (half + 1)
            place = (left, top, right - left, half)
            yield from draw_box(part, frame.shades, place, tip, frame.labels)
    elif span.is_compute:
        place = (left, y, right - left, height)
        yield from draw_box(span.action, frame.shades, place, tip, frame.labels)
    else:
        yield from _draw_lane(span.action, (left, y, right - left, height), tip)


def draw_box(
    action: Action,
    shades: Mapping[int, tuple[int, int]],
    place: tuple[float, float, float, float],
    tip: str = "",
    labels: Labels = "letters",
) -> Iterator[Item]:
    """A box for a compute action at (x, y, width, height), with its label if that fits."""
    x, y, width, height = place
    if width <= 0:
        return
    if width > 3:
        width -= 0.8  # lets neighbours be seen as two
    look = LOOKS[action.kind]
    yield Box(x, y, width, height, shade(action.kind, *shades.get(action.stage, (0, 1))), tip=tip)
    foot = height * _FOOT
    if look.hatch:
        yield Box(x, y + height - foot, width, foot, "", hatch=look.hatch)
    text, size = label_of(action, labels), label_size(height)
    if text and size >= 7 and text_width(text, size) + 2 <= width:
        base = y + (height - foot) / 2 + 0.36 * size
        yield Label(x + width / 2, base, text, size, ON_COLOUR, "middle")


def label_of(action: Action, labels: Labels) -> str:
    """Such as F3, or 3; nothing for an action of no microbatch."""
    if action.microbatch is None or labels == "none":
        return ""
    return f"{LOOKS[action.kind].letter if labels == 'letters' else ''}{action.microbatch}"


def label_size(height: float) -> float:
    """The size of the text in a box of a row."""
    return min(11.0, height * (1 - _FOOT) - 2, 5.0 + height / 5)


def _draw_lane(
    action: Action, place: tuple[float, float, float, float], tip: str
) -> Iterator[Item]:
    """A transfer points where its value goes: forwards or back. The rest is a bar."""
    x, y, width, height = place
    look = LOOKS[action.kind]
    width = max(width, 2.5)
    if not action.kind.is_transfer:
        yield Box(x, y, width, height, look.colour, hatch=look.hatch, tip=tip)
        return
    point = min(height / 2, width / 2)
    middle, bottom, right = y + height / 2, y + height, x + width
    fill = look.colour if action.kind.is_send else mix(look.colour, "#ffffff", 0.5)
    points: tuple[tuple[float, float], ...]
    if action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION):
        points = ((x, y), (right - point, y), (right, middle), (right - point, bottom), (x, bottom))
    else:
        points = ((right, y), (x + point, y), (x, middle), (x + point, bottom), (right, bottom))
    yield Area(points, fill, look.hatch, tip)


def pack_lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few lanes as possible, none overlapping another."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        for lane in lanes:
            if lane[-1].end <= span.start + 1e-12:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def tip_of(span: Span, time: Unit) -> str:
    """What a reader gets to see of an action when pointing at it."""
    lines = []
    for action in span.action.parts or (span.action,):
        text = f"{action}: {LOOKS[action.kind].name}, stage {action.stage}"
        if action.microbatch is not None:
            text += f", microbatch {action.microbatch}"
        if action.kind.is_transfer:
            text += f", {'to' if action.kind.is_send else 'from'} stage {action.peer}"
        lines.append(text)
    took = time.text(span.end - span.start)
    lines.append(f"rank {span.rank}, from {time.text(span.start)}, takes {took}")
    return "\n".join(lines)


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
