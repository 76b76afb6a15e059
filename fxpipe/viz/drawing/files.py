"""Write a scene to a file: SVG by ourselves, PNG and PDF by vl-convert from that SVG.

vl-convert carries its own fonts and renderer, so that the three formats show the same
picture on every machine and no system library is needed.
"""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import FxpipeError
from fxpipe.viz.drawing.scene import Scene
from fxpipe.viz.drawing.svg import write_svg

__all__ = ["PICTURES", "convert_svg", "write_scene"]

PICTURES = (".svg", ".png", ".pdf")
_MOST_PIXELS = 120e6


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
    else:
        path.write_bytes(convert_svg(write_svg(scene, dark=False), ending, scale=scale))


def convert_svg(svg: str, ending: str, *, scale: float = 2.0) -> bytes:
    """The data of a `.png` or `.pdf` that shows an SVG picture."""
    try:
        import vl_convert
    except ImportError as error:
        raise FxpipeError(
            f"{ending} pictures need vl-convert: pip install 'fxpipe[viz]'; .svg needs nothing"
        ) from error
    if ending == ".png":
        return vl_convert.svg_to_png(svg, scale=scale)
    return vl_convert.svg_to_pdf(svg)
