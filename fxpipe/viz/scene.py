"""A picture as data: boxes, areas, lines and labels with fixed places.

Layouts (timelines, stage graphs) make a `Scene`; `svg.write_scene` turns it into SVG,
PNG or PDF. Since everything has a place and every label a width, tests can check that no
text leaves its box.

Widths are those of DejaVu Sans, the widest of the usual sans-serif fonts: a label
that fits here fits with Helvetica, Arial or Liberation Sans too. The y axis points down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

__all__ = [
    "Area",
    "Box",
    "Hatch",
    "Item",
    "Label",
    "Line",
    "Scene",
    "arrow_head",
    "fit_text",
    "label_extent",
    "moved",
    "text_width",
]

Hatch = Literal["", "rising", "falling", "dots", "cross"]
"""A pattern over a filled shape, so that it can be told apart without colour."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; `tip` is what a browser shows when the mouse rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    stroke_width: float = 1.0
    radius: float = 0.0
    hatch: Hatch = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    fill: str
    hatch: Hatch = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; `dash` is a pattern such as "4 3", `arrow` ends it with a head."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.0
    dash: str = ""
    arrow: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text; (x, y) is on its baseline, at the end that `anchor` names."""

    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Item: TypeAlias = Box | Area | Line | Label


@dataclass(frozen=True, slots=True)
class Scene:
    """What to paint, in order, on a sheet of the given size."""

    width: float
    height: float
    items: tuple[Item, ...]
    title: str


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """How wide a text is at most, for the fonts that pictures ask for."""
    units = sum(_WIDTHS.get(letter, _WIDEST) for letter in text)
    return units * size / 1000 * (1.13 if bold else 1.0)


def fit_text(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """The text, with its middle left out if it is wider than `width`."""
    if text_width(text, size, bold=bold) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        head = (kept + 1) // 2
        short = f"{text[:head]}…{text[len(text) - (kept - head) :]}"
        if text_width(short, size, bold=bold) <= width:
            return short
    return ""


def label_extent(label: Label) -> tuple[float, float, float, float]:
    """The rectangle that a label takes: left, top, right, bottom."""
    width = text_width(label.text, label.size, bold=label.bold)
    left = label.x - {"start": 0.0, "middle": width / 2, "end": width}[label.anchor]
    return left, label.y - 0.76 * label.size, left + width, label.y + 0.24 * label.size


def moved(item: Item, right: float, down: float) -> Item:
    """The item at another place."""
    if isinstance(item, (Box, Label)):
        return replace(item, x=item.x + right, y=item.y + down)
    return replace(item, points=tuple((x + right, y + down) for x, y in item.points))


def arrow_head(line: Line) -> tuple[tuple[float, float], ...]:
    """The triangle at the end of a line."""
    (x0, y0), (x, y) = line.points[-2:]
    length = max(((x - x0) ** 2 + (y - y0) ** 2) ** 0.5, 1e-9)
    ux, uy = (x - x0) / length, (y - y0) / length
    back, half = 6.0 + line.width, 2.4 + line.width
    bx, by = x - back * ux, y - back * uy
    return (x, y), (bx - half * uy, by + half * ux), (bx + half * uy, by - half * ux)


# Advance widths in thousandths of the font size, from space to tilde.
_ASCII = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337,
    636, 636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531,
    1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787,
    603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500,
    500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612,
    635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838,
)  # fmt: skip
_WIDTHS = {chr(32 + index): width for index, width in enumerate(_ASCII)}
_WIDTHS |= {"…": 1000, "→": 838, "←": 838, "×": 838, "·": 318, "–": 500, "µ": 636}
_WIDEST = 1000
