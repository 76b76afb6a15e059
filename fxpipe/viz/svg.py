"""Write a scene to a file: SVG by ourselves, PNG and PDF by vl-convert from that SVG.

The SVG stands alone: no script, no font, nothing of the page around it.

Several pictures may share one HTML page (a notebook, the report), so nothing here can reach
another picture: the picture's own mark is in every name. Colours are attributes; a style
replaces those of the light theme where the reader prefers dark.

vl-convert carries its own fonts and renderer, so that the three formats show the same picture on
every machine and no system library is needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from fxpipe.errors import FxpipeError
from fxpipe.viz.palette import DARK, LIGHT
from fxpipe.viz.scene import Area, Box, Hatch, Item, Label, Line, Scene, arrow_head

__all__ = ["PICTURES", "picture_path", "write_scene", "write_svg"]

_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

_INK = "#000000"
_PATTERNS: dict[str, str] = {
    "rising": '<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5" stroke="{ink}" stroke-width="1.1"/>',
    "falling": '<path d="M-1 -1L7 7M5 -1L7 1M-1 5L1 7" stroke="{ink}" stroke-width="1.1"/>',
    "dots": '<circle cx="1.5" cy="1.5" r="0.9" fill="{ink}"/>'
    '<circle cx="4.5" cy="4.5" r="0.9" fill="{ink}"/>',
    "cross": '<path d="M0 3H6M3 0V6" stroke="{ink}" stroke-width="0.9"/>',
}


def write_svg(scene: Scene, *, inline: bool = False, dark: bool = True) -> str:
    """The scene as SVG text; with `dark` it follows a reader who prefers a dark page.

    With `inline` for a place inside an HTML page: no XML header, and never wider than the
    page.
    """
    mark = "x" + hashlib.sha256(repr(scene).encode()).hexdigest()[:8]
    style = ' style="max-width:100%;height:auto"' if inline else ""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{mark}" width="{_n(scene.width)}" '
        f'height="{_n(scene.height)}" viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" '
        f'role="img" font-family="{_FONT}"{style}>',
        f"<title>{escape(scene.title)}</title>",
        f'<rect width="100%" height="100%" {_paint(fill=LIGHT.paper)}/>',
        *_definitions(scene.items, mark),
        *_groups(scene.items, mark),
        "</svg>\n",
    ]
    if dark:
        lines.insert(2, f"<style>{_dark_style(mark)}</style>")
    if not inline:
        lines.insert(0, '<?xml version="1.0" encoding="UTF-8"?>')
    return "\n".join(lines)


def _dark_style(mark: str) -> str:
    pairs = zip(astuple(LIGHT), astuple(DARK), strict=True)
    rules = "".join(
        f'#{mark} [{name}="{light}"]{{{name}:{dark}}}'
        for light, dark in pairs
        for name in ("fill", "stroke")
    )
    return f"@media(prefers-color-scheme:dark){{{rules}}}"


def _definitions(items: Iterable[Item], mark: str) -> Iterator[str]:
    used = sorted({item.hatch for item in items if isinstance(item, (Box, Area)) and item.hatch})
    if used:
        patterns = (
            f'<pattern id="{mark}{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<g opacity="0.5">{_PATTERNS[name].format(ink=_INK)}</g></pattern>'
            for name in used
        )
        yield f"<defs>{''.join(patterns)}</defs>"


def _groups(items: Iterable[Item], mark: str) -> Iterator[str]:
    """One group for each run of items that look alike, which keeps the file small."""
    for attributes, run in groupby(items, key=_shared):
        yield f"<g {attributes}>" + "".join(_element(item, mark) for item in run) + "</g>"


def _shared(item: Item) -> str:
    if isinstance(item, Label):
        anchor = "" if item.anchor == "start" else f' text-anchor="{item.anchor}"'
        bold = ' font-weight="bold"' if item.bold else ""
        return f'font-size="{_n(item.size)}" {_paint(fill=item.fill)}{anchor}{bold}'
    if isinstance(item, Line):
        dash = f' stroke-dasharray="{item.dash}"' if item.dash else ""
        paint = _paint(fill="none", stroke=item.stroke)
        return f'{paint} stroke-width="{_n(item.width)}"{dash}'
    if isinstance(item, Box) and item.stroke:
        paint = _paint(fill=item.fill or "none", stroke=item.stroke)
        return f'{paint} stroke-width="{_n(item.stroke_width)}"'
    return _paint(fill=item.fill or "none")


def _paint(**colours: str) -> str:
    return " ".join(f'{name}="{colour}"' for name, colour in colours.items())


def _element(item: Item, mark: str) -> str:
    if isinstance(item, Label):
        return f'<text x="{_n(item.x)}" y="{_n(item.y)}">{escape(item.text)}</text>'
    if isinstance(item, Line):
        points = (f"{_n(x)} {_n(y)}" for x, y in item.points)
        path = f'<path d="M{"L".join(points)}"/>'
        if not item.arrow:
            return path
        # Drawn, not a marker: markers are found by name, and names are the page's.
        head = _points(arrow_head(item))
        return path + f'<polygon points="{head}" {_paint(fill=item.stroke, stroke="none")}/>'
    if isinstance(item, Area):
        return _hatched("polygon", f'points="{_points(item.points)}"', item.hatch, item.tip, mark)
    place = f'x="{_n(item.x)}" y="{_n(item.y)}" width="{_n(item.width)}" height="{_n(item.height)}"'
    if item.radius:
        place += f' rx="{_n(item.radius)}"'
    return _hatched("rect", place, item.hatch, item.tip, mark)


def _hatched(tag: str, place: str, hatch: Hatch, tip: str, mark: str) -> str:
    shape = f"<{tag} {place}><title>{escape(tip)}</title></{tag}>" if tip else f"<{tag} {place}/>"
    if hatch:
        fill = _paint(fill=f"url(#{mark}{hatch})", stroke="none")
        shape += f'<{tag} {place} {fill} pointer-events="none"/>'
    return shape


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


PICTURES = (".svg", ".png", ".pdf")
_MOST_PIXELS = 120e6


def picture_path(
    path: str | os.PathLike[str], what: str, endings: Sequence[str]
) -> tuple[Path, str]:
    """The path and its ending, which says what is written.

    Raises:
        FxpipeError: it is none of these endings.
    """
    path = Path(path)
    if path.suffix.lower() not in endings:
        raise FxpipeError(
            f"cannot draw {what} as {path.name!r}: the name must end with one of "
            f"{', '.join(endings)}"
        )
    return path, path.suffix.lower()


def write_scene(scene: Scene, path: Path, *, scale: float = 2.0) -> None:
    """Write the picture in the format that the ending of `path` names.

    `scale` is the pixels of a PNG for each unit of width.

    Raises:
        FxpipeError: vl-convert is not installed, or the PNG would be too large.
    """
    ending = path.suffix.lower()
    if ending == ".png" and scene.width * scene.height * scale**2 > _MOST_PIXELS:
        raise FxpipeError(
            f"a PNG of {scene.width * scale:.0f} x {scene.height * scale:.0f} pixels is too "
            "large; write .svg or .pdf, or choose a smaller scale"
        )
    if ending == ".svg":
        path.write_text(write_svg(scene), encoding="utf-8")
        return
    try:
        import vl_convert
    except ImportError as error:
        raise FxpipeError(
            f"{ending} pictures need vl-convert: pip install 'fxpipe[viz]'; .svg needs nothing"
        ) from error
    svg = write_svg(scene, dark=False)
    is_png = ending == ".png"
    path.write_bytes(
        vl_convert.svg_to_png(svg, scale=scale) if is_png else vl_convert.svg_to_pdf(svg)
    )
