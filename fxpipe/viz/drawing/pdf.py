"""Write a scene as PDF: one page, sharp at any size, with a font every reader has.

Text is Helvetica, which PDF readers bring along. Its widths are known, so that centred
labels stand where they should; it has no arrows, which are spelled out.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator

from fxpipe.viz.drawing.scene import Area, Box, Hatch, Item, Label, Line, Scene, arrow_head

__all__ = ["write_pdf"]

_SPELLED = str.maketrans({"→": "->", "←": "<-"})
_PERIOD = 6.0  # of the hatches, as in SVG
_ROUND = 0.5523  # a quarter circle as a Bézier curve

Point = tuple[float, float]


def write_pdf(scene: Scene) -> bytes:
    """The scene as a PDF file of one page."""
    size = f"{_n(scene.width)} {_n(scene.height)}"
    commands = [f"1 0 0 -1 0 {_n(scene.height)} cm"]
    if scene.background:
        commands.append(f"{_colour(scene.background)} rg 0 0 {size} re f")
    for item in scene.items:
        commands += _commands(item)
    content = zlib.compress("\n".join(commands).encode("cp1252", "replace"), 9)
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /{} /Encoding /WinAnsiEncoding >>"
    title = scene.title.encode("cp1252", "replace").hex()
    return _file(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            (
                f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size}] "
                "/Resources << /Font << /F0 5 0 R /F1 6 0 R >> /ExtGState << /G 7 0 R >> >> "
                "/Contents 4 0 R >>"
            ).encode(),
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream"
            % (len(content), content),
            font.format("Helvetica").encode(),
            font.format("Helvetica-Bold").encode(),
            b"<< /Type /ExtGState /ca 0.5 /CA 0.5 >>",
            f"<< /Title <{title}> /Producer (fxpipe) >>".encode(),
        ]
    )


def _file(objects: list[bytes]) -> bytes:
    """Number the objects and add the table of where each starts."""
    data = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    starts = []
    for number, content in enumerate(objects, start=1):
        starts.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % start for start in starts)
    data += b"trailer\n<< /Size %d /Root 1 0 R /Info %d 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        len(objects),
        table,
    )
    return bytes(data)


def _commands(item: Item) -> Iterator[str]:
    if isinstance(item, Label):
        yield _label(item)
    elif isinstance(item, Line):
        dash = f"[{item.dash}] 0 d " if item.dash else "[] 0 d "
        yield f"{dash}{_colour(item.stroke)} RG {_n(item.width)} w {_line(item)} S"
        if item.arrow:
            yield f"{_colour(item.stroke)} rg {_polygon(arrow_head(item))} f"
    elif isinstance(item, Area):
        yield f"{_colour(item.fill)} rg {_polygon(item.points)} f"
        yield from _hatch(item.hatch, item.points)
    else:
        path = _rectangle(item)
        if item.fill:
            yield f"{_colour(item.fill)} rg {path} f"
        if item.stroke:
            yield f"[] 0 d {_colour(item.stroke)} RG {_n(item.stroke_width)} w {path} S"
        right, bottom = item.x + item.width, item.y + item.height
        corners = ((item.x, item.y), (right, item.y), (right, bottom), (item.x, bottom))
        yield from _hatch(item.hatch, corners)


def _label(label: Label) -> str:
    text = label.text.translate(_SPELLED)
    widths = _BOLD if label.bold else _REGULAR
    width = sum(widths.get(letter, 600) for letter in text) * label.size / 1000
    x = label.x - {"start": 0.0, "middle": width / 2, "end": width}[label.anchor]
    quoted = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    font = f"/F{int(label.bold)} {_n(label.size)} Tf"
    return f"BT {_colour(label.fill)} rg {font} 1 0 0 -1 {_n(x)} {_n(label.y)} Tm ({quoted}) Tj ET"


def _line(line: Line) -> str:
    (x, y), *rest = line.points
    if line.curved:
        return f"{_n(x)} {_n(y)} m " + " ".join(f"{_n(a)} {_n(b)}" for a, b in rest) + " c"
    return f"{_n(x)} {_n(y)} m " + " ".join(f"{_n(a)} {_n(b)} l" for a, b in rest)


def _polygon(points: Iterable[Point]) -> str:
    (x, y), *rest = points
    return f"{_n(x)} {_n(y)} m " + " ".join(f"{_n(a)} {_n(b)} l" for a, b in rest) + " h"


def _rectangle(box: Box) -> str:
    left, top, right, bottom = box.x, box.y, box.x + box.width, box.y + box.height
    radius = min(box.radius, box.width / 2, box.height / 2)
    if radius <= 0:
        return f"{_n(left)} {_n(top)} {_n(box.width)} {_n(box.height)} re"
    path = [f"{_n(left + radius)} {_n(top)} m"]
    inner = radius * (1 - _ROUND)
    for start, first, second, end in (
        ((right - radius, top), (right - inner, top), (right, top + inner), (right, top + radius)),
        (
            (right, bottom - radius),
            (right, bottom - inner),
            (right - inner, bottom),
            (right - radius, bottom),
        ),
        (
            (left + radius, bottom),
            (left + inner, bottom),
            (left, bottom - inner),
            (left, bottom - radius),
        ),
        ((left, top + radius), (left, top + inner), (left + inner, top), (left + radius, top)),
    ):
        path.append(f"{_n(start[0])} {_n(start[1])} l")
        path.append(" ".join(f"{_n(x)} {_n(y)}" for x, y in (first, second, end)) + " c")
    return " ".join(path) + " h"


def _hatch(hatch: Hatch, points: tuple[Point, ...]) -> Iterator[str]:
    """Lines or dots, clipped to the shape and half transparent."""
    if not hatch:
        return
    left, top = (min(p[i] for p in points) for i in (0, 1))
    right, bottom = (max(p[i] for p in points) for i in (0, 1))
    yield f"q /G gs {_polygon(points)} W n [] 0 d 0 G 0 g 1.1 w"
    for row in range(math.floor(top / _PERIOD), math.ceil(bottom / _PERIOD)):
        for column in range(math.floor(left / _PERIOD), math.ceil(right / _PERIOD)):
            x, y = column * _PERIOD, row * _PERIOD
            yield _tile(hatch, x, y)
    yield "Q"


def _tile(hatch: Hatch, x: float, y: float) -> str:
    far_x, far_y = x + _PERIOD, y + _PERIOD
    if hatch == "rising":
        return f"{_n(x)} {_n(far_y)} m {_n(far_x)} {_n(y)} l S"
    if hatch == "falling":
        return f"{_n(x)} {_n(y)} m {_n(far_x)} {_n(far_y)} l S"
    if hatch == "cross":
        middle = _PERIOD / 2
        return (
            f"{_n(x + middle)} {_n(y)} m {_n(x + middle)} {_n(far_y)} l S "
            f"{_n(x)} {_n(y + middle)} m {_n(far_x)} {_n(y + middle)} l S"
        )
    spots = (Box(x + at - 0.9, y + at - 0.9, 1.8, 1.8, "", radius=0.9) for at in (1.5, 4.5))
    return " ".join(f"{_rectangle(spot)} f" for spot in spots)


def _colour(colour: str) -> str:
    return " ".join(_n(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))


def _n(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


# Advance widths of Helvetica in thousandths of the font size, from space to tilde.
_REGULAR_ASCII = (
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278,
    556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556,
    1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778,
    667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556,
    333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556,
    556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
)  # fmt: skip
_BOLD_ASCII = (
    278, 333, 474, 556, 556, 889, 722, 238, 333, 333, 389, 584, 278, 333, 278, 278,
    556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 333, 333, 584, 584, 584, 611,
    975, 722, 722, 722, 722, 667, 611, 778, 722, 278, 556, 722, 611, 833, 722, 778,
    667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 333, 278, 333, 584, 556,
    333, 556, 611, 556, 611, 556, 333, 611, 611, 278, 278, 556, 278, 889, 611, 611,
    611, 611, 389, 556, 333, 611, 556, 778, 556, 556, 500, 389, 280, 389, 584,
)  # fmt: skip
_SIGNS = {"…": 1000, "×": 584, "·": 278, "–": 556, "µ": 556}
_REGULAR = {chr(32 + i): width for i, width in enumerate(_REGULAR_ASCII)} | _SIGNS
_BOLD = {chr(32 + i): width for i, width in enumerate(_BOLD_ASCII)} | _SIGNS
