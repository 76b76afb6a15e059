import re
import struct
import sys
import xml.etree.ElementTree as ET

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.viz.palette import DARK, LIGHT
from fxpipe.viz.scene import Area, Box, Label, Line, Scene
from fxpipe.viz.svg import write_scene, write_svg

SVG = "{http://www.w3.org/2000/svg}"


def scene(*items):
    return Scene(100, 50.5, items, "a <picture> & more")


def test_items_become_elements_in_order():
    text = write_svg(
        scene(
            Box(1, 2, 30, 10.125, "#ff0000", "#000000", 2, radius=3, tip="x < y"),
            Line(((0, 0), (5, 5)), "#00ff00", 1.5, "4 2", arrow=True),
            Area(((0, 0), (1, 0), (0, 1)), "#0000ff"),
            Label(3, 4, "a & b", 11, "#111111", "middle", bold=True),
        ),
        dark=False,
    )

    mark = re.search(r'id="(\w+)"', text)[1]
    assert text.replace(f'id="{mark}" ', "").splitlines() == [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="50.5" '
        'viewBox="0 0 100 50.5" role="img" '
        "font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\">",
        "<title>a &lt;picture&gt; &amp; more</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<g fill="#ff0000" stroke="#000000" stroke-width="2">'
        '<rect x="1" y="2" width="30" height="10.12" rx="3"><title>x &lt; y</title></rect></g>',
        '<g fill="none" stroke="#00ff00" stroke-width="1.5" stroke-dasharray="4 2">'
        '<path d="M0 0L5 5"/>'
        '<polygon points="5,5 -3.06,2.45 2.45,-3.06" fill="#00ff00" stroke="none"/></g>',
        '<g fill="#0000ff"><polygon points="0,0 1,0 0,1"/></g>',
        '<g font-size="11" fill="#111111" text-anchor="middle" font-weight="bold">'
        '<text x="3" y="4">a &amp; b</text></g>',
        "</svg>",
    ]


def test_alike_items_share_a_group():
    text = write_svg(scene(*(Box(i, 0, 1, 1, "#123456") for i in range(50))))

    assert text.count("#123456") == 1
    assert text.count("<rect ") == 51


@pytest.mark.parametrize("hatch", ["rising", "falling", "dots", "cross"])
def test_hatch_is_a_pattern_that_only_this_picture_uses(hatch):
    # Two pictures in one notebook page once shared pattern names: the browser takes the
    # first definition in the page, and hiding that picture blanked the hatches of the other.
    first = ET.fromstring(write_svg(scene(Box(0, 0, 9, 9, "#ffffff", hatch=hatch))).encode())
    other = ET.fromstring(write_svg(scene(Box(0, 0, 8, 9, "#ffffff", hatch=hatch))).encode())

    names = [next(tree.iter(f"{SVG}pattern")).get("id") for tree in (first, other)]
    used = [rect.get("fill") for rect in first.iter(f"{SVG}rect")]

    assert names[0] != names[1]
    assert f"url(#{names[0]})" in used


def test_dark_mode_reaches_this_picture_alone():
    text = write_svg(scene(Box(0, 0, 1, 1, LIGHT.fill, LIGHT.rule)), inline=True)

    mark = re.search(r'id="(\w+)"', text)[1]
    assert f'#{mark} [fill="{LIGHT.fill}"]{{fill:{DARK.fill}}}' in text
    assert f'#{mark} [stroke="{LIGHT.rule}"]{{stroke:{DARK.rule}}}' in text
    assert f'fill="{LIGHT.fill}" stroke="{LIGHT.rule}"' in text
    assert "<?xml" not in text


def scene_of(*items, width=40.0, height=30.0):
    return Scene(width, height, items, "test")


def png_of(path, *items, scale=2.0):
    write_scene(scene_of(*items), path, scale=scale)
    return path.read_bytes()


def test_png_has_the_size_of_the_scene_times_the_scale(tmp_path):
    data = png_of(tmp_path / "a.png", Box(10, 5, 20, 10, "#ff0000"), scale=3.0)

    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (120, 90)


def test_text_and_hatches_reach_the_png(tmp_path):
    items = [
        (),
        (Label(4, 18, "1 → 2", 9, "#000000"),),
        *((Box(0, 0, 40, 30, "#ffffff", hatch=h),) for h in ("rising", "falling", "dots", "cross")),
    ]

    pictures = [png_of(tmp_path / "a.png", *some) for some in items]

    assert len(set(pictures)) == len(items)


def test_pdf_holds_one_page_of_the_size_of_the_scene(tmp_path):
    write_scene(scene_of(Box(1, 2, 3, 4, "#ff0000")), tmp_path / "a.pdf")

    data = (tmp_path / "a.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert b"/MediaBox [0 0 40 30]" in data.replace(b".0", b"")


def test_too_large_a_png_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(FxpipeError, match=r"20000 x 20000 pixels is too large; write \.svg"):
        write_scene(scene_of(width=10_000, height=10_000), tmp_path / "a.png")


def test_missing_converter_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)

    with pytest.raises(FxpipeError, match=r"\.png pictures need vl-convert: pip install 'fxpipe"):
        write_scene(scene_of(), tmp_path / "a.png")
    write_scene(scene_of(), tmp_path / "a.svg")
