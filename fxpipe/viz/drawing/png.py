"""Write a scene as PNG with Pillow, which needs no system library and no browser.

Everything is painted several times larger and scaled down, since Pillow itself
does not smooth edges. Text uses DejaVu Sans or Arial where there is one, else the font
that Pillow brings, in which arrows and the multiplication sign are spelled out.
"""

from __future__ import annotations

import io
import math
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from fxpipe.errors import FxpipeError
from fxpipe.viz.drawing.scene import (
    Area,
    Box,
    Hatch,
    Item,
    Label,
    Line,
    Scene,
    arrow_head,
    text_width,
)

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

__all__ = ["write_png"]

_REGULAR = ("DejaVuSans.ttf", "Arial.ttf", "arial.ttf", "LiberationSans-Regular.ttf")
_BOLD = ("DejaVuSans-Bold.ttf", "Arial Bold.ttf", "arialbd.ttf", "LiberationSans-Bold.ttf")
_SPELLED = {"→": "->", "←": "<-", "×": "x", "µ": "u", "–": "-", "·": ".", "…": "..."}
_MOST_PIXELS = 60_000_000
_PERIOD = 6.0  # of the hatches, as in SVG


def write_png(scene: Scene, *, scale: float = 2.0) -> bytes:
    """The scene as a PNG file, `scale` pixels for each unit.

    Raises:
        FxpipeError: Pillow is not installed, or the picture is too large to paint.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise FxpipeError(
            "PNG pictures need Pillow, which is not installed: pip install 'fxpipe[viz]', "
            "or write .svg, which needs nothing"
        ) from error
    pixels = scene.width * scene.height * scale * scale
    if pixels > _MOST_PIXELS:
        raise FxpipeError(
            f"a PNG of {scene.width * scale:.0f} x {scene.height * scale:.0f} pixels is too "
            "large; write .svg, or pass a smaller width or scale"
        )
    smooth = max(1, min(3, math.isqrt(int(_MOST_PIXELS / pixels))))
    zoom = scale * smooth
    size = (math.ceil(scene.width * zoom), math.ceil(scene.height * zoom))
    image = Image.new("RGB", size, scene.background or "#ffffff")
    painter = _Painter(image, ImageDraw.Draw(image), zoom)
    for item in scene.items:
        painter.paint(item)
    if smooth > 1:
        small = (math.ceil(scene.width * scale), math.ceil(scene.height * scale))
        image = image.resize(small, Image.Resampling.BOX)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


class _Painter:
    """Paints items on one image."""

    def __init__(self, image: Image.Image, draw: ImageDraw.ImageDraw, zoom: float) -> None:
        self.image = image
        self.draw = draw
        self.zoom = zoom

    def paint(self, item: Item) -> None:
        if isinstance(item, Box):
            self._paint_box(item)
        elif isinstance(item, Area):
            points = self._scaled(item.points)
            self.draw.polygon(points, fill=item.fill)
            if item.hatch:
                self._paint_hatch(points, item.hatch)
        elif isinstance(item, Line):
            self._paint_line(item)
        else:
            self._paint_label(item)

    def _scaled(self, points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
        return [(x * self.zoom, y * self.zoom) for x, y in points]

    def _paint_box(self, box: Box) -> None:
        half = box.stroke_width / 2 if box.stroke else 0.0
        left, top, right, bottom = (
            (box.x - half) * self.zoom,
            (box.y - half) * self.zoom,
            (box.x + box.width + half) * self.zoom - 1,
            (box.y + box.height + half) * self.zoom - 1,
        )
        if right < left or bottom < top:
            return
        self.draw.rounded_rectangle(
            (left, top, right, bottom),
            radius=box.radius * self.zoom,
            fill=box.fill or None,
            outline=box.stroke or None,
            width=max(1, round(box.stroke_width * self.zoom)) if box.stroke else 0,
        )
        if box.hatch:
            corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
            self._paint_hatch(corners, box.hatch)

    def _paint_hatch(self, points: list[tuple[float, float]], hatch: Hatch) -> None:
        from PIL import Image, ImageDraw

        left, top = (math.floor(min(p[i] for p in points)) for i in (0, 1))
        right, bottom = (math.ceil(max(p[i] for p in points)) + 1 for i in (0, 1))
        size = (right - left, bottom - top)
        inside = Image.new("L", size, 0)
        ImageDraw.Draw(inside).polygon([(x - left, y - top) for x, y in points], fill=128)
        lines = Image.new("L", size, 0)
        self._draw_hatch(ImageDraw.Draw(lines), hatch, (left, top), size)
        nothing = Image.new("L", size, 0)
        self.image.paste("#000000", (left, top), Image.composite(inside, nothing, lines))

    def _draw_hatch(
        self,
        draw: ImageDraw.ImageDraw,
        hatch: Hatch,
        origin: tuple[int, int],
        size: tuple[int, int],
    ) -> None:
        """Draw a hatch that starts at the picture's corner, so that neighbours meet."""
        step = _PERIOD * self.zoom
        width, height = size
        x0, y0 = -(origin[0] % step), -(origin[1] % step)
        thick = max(1, round(1.1 * self.zoom))
        for row in range(math.ceil((height - y0) / step) + 1):
            for column in range(math.ceil((width - x0) / step) + 1):
                x, y = x0 + column * step, y0 + row * step
                if hatch == "rising":
                    draw.line((x, y + step, x + step, y), fill=255, width=thick)
                elif hatch == "falling":
                    draw.line((x, y, x + step, y + step), fill=255, width=thick)
                elif hatch == "cross":
                    draw.line((x + step / 2, y, x + step / 2, y + step), fill=255, width=thick)
                    draw.line((x, y + step / 2, x + step, y + step / 2), fill=255, width=thick)
                else:
                    radius = 0.9 * self.zoom
                    for part in (0.25, 0.75):
                        cx, cy = x + part * step, y + part * step
                        spot = (cx - radius, cy - radius, cx + radius, cy + radius)
                        draw.ellipse(spot, fill=255)

    def _paint_line(self, line: Line) -> None:
        points = _curve(line.points) if line.curved else line.points
        width = max(1, round(line.width * self.zoom))
        for piece in _dashes(points, line.dash):
            self.draw.line(self._scaled(piece), fill=line.stroke, width=width, joint="curve")
        if line.arrow:
            self.draw.polygon(self._scaled(arrow_head(line)), fill=line.stroke)

    def _paint_label(self, label: Label) -> None:
        size = label.size * self.zoom
        font, has_signs = _font(size, label.bold)
        text = label.text
        if not has_signs:
            text = "".join(_SPELLED.get(letter, letter) for letter in text)
        room = text_width(label.text, size, bold=label.bold)
        if font.getlength(text) > room:
            font, _ = _font(size * room / font.getlength(text), label.bold)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
        place = (label.x * self.zoom, label.y * self.zoom)
        self.draw.text(place, text, fill=label.fill, font=font, anchor=anchor)


@cache
def _font(size: float, bold: bool) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """A font, and whether it has the signs of `_SPELLED`."""
    from PIL import ImageFont

    for name in _BOLD if bold else _REGULAR:
        try:
            return ImageFont.truetype(name, size), True
        except OSError:
            continue
    return ImageFont.load_default(size), False


def _curve(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Points along a cubic curve."""
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = points
    curve = []
    for index in range(25):
        t = index / 24
        u = 1 - t
        weights = (u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t)
        curve.append(
            (
                weights[0] * ax + weights[1] * bx + weights[2] * cx + weights[3] * dx,
                weights[0] * ay + weights[1] * by + weights[2] * cy + weights[3] * dy,
            )
        )
    return tuple(curve)


def _dashes(
    points: tuple[tuple[float, float], ...], dash: str
) -> list[tuple[tuple[float, float], ...]]:
    """The visible pieces of a line."""
    if not dash:
        return [points]
    lengths = [float(part) for part in dash.split()]
    pieces: list[tuple[tuple[float, float], ...]] = []
    piece: list[tuple[float, float]] = [points[0]]
    at, left = 0, lengths[0]
    for (x0, y0), (x1, y1) in pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        done = 0.0
        while length - done > left:
            done += left
            spot = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if at % 2 == 0:
                pieces.append((*piece, spot))
            piece = [spot]
            at += 1
            left = lengths[at % len(lengths)]
        left -= length - done
        piece.append((x1, y1))
    if at % 2 == 0 and len(piece) > 1:
        pieces.append(tuple(piece))
    return pieces
