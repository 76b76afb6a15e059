import io
import sys

import pytest
from PIL import Image

from fxpipe.errors import FxpipeError
from fxpipe.viz.drawing import png
from fxpipe.viz.drawing.png import write_png
from fxpipe.viz.drawing.scene import Area, Box, Label, Line, Scene


def paint(*items, width=40, height=30, scale=2.0):
    data = write_png(Scene(width, height, items, "test", "#ffffff"), scale=scale)
    return Image.open(io.BytesIO(data)).convert("RGB")


def share_of(image, box, colour):
    part = image.crop(box)
    pixels = list(part.get_flattened_data())
    return sum(pixel == colour for pixel in pixels) / len(pixels)


def test_size_is_the_scene_times_the_scale():
    assert paint(width=40, height=30).size == (80, 60)
    assert paint(width=40.2, height=30, scale=1).size == (41, 30)


def test_box_fills_exactly_its_place():
    image = paint(Box(10, 5, 20, 10, "#ff0000"))

    assert share_of(image, (22, 12, 58, 28), (255, 0, 0)) == 1
    assert share_of(image, (0, 0, 18, 60), (255, 255, 255)) == 1
    assert share_of(image, (62, 0, 80, 60), (255, 255, 255)) == 1


@pytest.mark.parametrize("hatch", ["rising", "falling", "dots", "cross"])
def test_hatch_darkens_a_part_of_a_shape_and_nothing_else(hatch):
    box = paint(Box(10, 5, 24, 18, "#ffffff", hatch=hatch))
    area = paint(Area(((10, 5), (34, 5), (34, 23), (10, 23)), "#ffffff", hatch))

    for image in (box, area):
        assert 0.05 < 1 - share_of(image, (22, 12, 66, 44), (255, 255, 255)) < 0.75
        assert share_of(image, (0, 0, 17, 60), (255, 255, 255)) == 1


def test_hatches_differ():
    images = [
        paint(Box(0, 0, 40, 30, "#ffffff", hatch=hatch)).tobytes()
        for hatch in ("", "rising", "falling", "dots", "cross")
    ]

    assert len(set(images)) == 5


def test_dashed_line_has_holes():
    solid = paint(Line(((0, 15), (40, 15)), "#000000", 4))
    dashed = paint(Line(((0, 15), (40, 15)), "#000000", 4, dash="5 5"))

    assert share_of(solid, (0, 30, 80, 31), (0, 0, 0)) == 1
    assert 0.3 < share_of(dashed, (0, 30, 80, 31), (0, 0, 0)) < 0.7


def test_curve_and_arrow_reach_their_end():
    curve = ((0.0, 0.0), (20.0, 0.0), (20.0, 25.0), (38.0, 25.0))

    image = paint(Line(curve, "#000000", 2, arrow=True, curved=True))

    assert share_of(image, (66, 48, 72, 52), (0, 0, 0)) > 0.5


@pytest.mark.parametrize("fonts", [None, ()])
def test_label_stays_within_its_width(fonts, monkeypatch):
    # Where no known font is installed Pillow's own is used; it has no arrows.
    if fonts is not None:
        monkeypatch.setattr(png, "_REGULAR", fonts)
    png._font.cache_clear()

    image = paint(Label(10, 18, "1 → 2 × …", 9, "#000000"), width=100)

    png._font.cache_clear()
    dark = [x for x in range(200) for y in range(60) if image.getpixel((x, y)) < (128, 128, 128)]
    assert min(dark) >= 19
    assert max(dark) <= 20 + 2 * 9 * 6


def test_too_large_a_picture_is_refused_with_a_way_out():
    with pytest.raises(FxpipeError, match=r"20000 x 20000 pixels is too large; write \.svg"):
        paint(width=10_000, height=10_000)


def test_missing_pillow_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)

    with pytest.raises(FxpipeError, match=r"PNG pictures need Pillow.*pip install 'fxpipe\[viz\]'"):
        paint()
