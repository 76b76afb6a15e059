import struct
import sys

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.viz.drawing.files import write_scene
from fxpipe.viz.drawing.scene import Box, Label, Scene


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
