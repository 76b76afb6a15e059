import re
import zlib

import pytest

from fxpipe.viz.drawing.pdf import write_pdf
from fxpipe.viz.drawing.scene import Area, Box, Label, Line, Scene
from fxpipe.viz.pipe_picture.columns import lay_out_pipe
from fxpipe.viz.timeline_picture.gantt import Options, lay_out_timeline
from tests.viz.pipes import outline_of
from tests.viz.timelines import lowered_timeline


def content_of(data):
    start = data.index(b"stream\n") + 7
    return zlib.decompress(data[start : data.index(b"\nendstream")]).decode("cp1252").splitlines()


def draw(*items):
    return content_of(write_pdf(Scene(100, 50, items, "test", "#ffffff")))[2:]


def test_table_points_at_every_object():
    data = write_pdf(Scene(100, 50, (Box(1, 2, 3, 4, "#ff0000"),), "a (test)", "#ffffff"))

    table = int(data.rsplit(b"startxref\n", 1)[1].split()[0])
    assert data[table : table + 4] == b"xref"
    starts = [int(line[:10]) for line in data[table:].split(b"\n")[3:11]]
    for number, start in enumerate(starts, start=1):
        assert data[start:].startswith(b"%d 0 obj\n" % number)
    length = int(re.search(rb"/Length (\d+)", data)[1])
    start = data.index(b"stream\n") + 7
    assert data[start + length :].startswith(b"\nendstream")
    assert b"/MediaBox [0 0 100 50]" in data


def test_items_become_commands():
    assert draw(
        Box(1, 2, 30, 10, "#ff0000", "#000000", 2),
        Line(((0, 0), (5, 5)), "#00ff00", 1.5, "4 2"),
        Area(((0, 0), (1, 0), (0, 1)), "#0000ff"),
        Label(3, 4, "a (b)\\", 10, "#000000"),
    ) == [
        "1 0 0 rg 1 2 30 10 re f",
        "[] 0 d 0 0 0 RG 2 w 1 2 30 10 re S",
        "[4 2] 0 d 0 1 0 RG 1.5 w 0 0 m 5 5 l S",
        "0 0 1 rg 0 0 m 1 0 l 0 1 l h f",
        "BT 0 0 0 rg /F0 10 Tf 1 0 0 -1 3 4 Tm (a \\(b\\)\\\\) Tj ET",
    ]


def test_labels_are_anchored_by_the_widths_of_the_font():
    middle, end = draw(
        Label(50, 9, "ab", 10, "#000000", "middle"), Label(50, 9, "ab", 10, "#000000", "end", True)
    )

    assert "1 0 0 -1 44.44 9 Tm" in middle
    assert "/F1 10 Tf 1 0 0 -1 38.33 9 Tm" in end


def test_arrows_are_spelled_and_other_signs_kept():
    (text,) = draw(Label(0, 9, "1 → 2 × 3 · 4 – 5 …", 10, "#000000"))

    assert "(1 -> 2 × 3 · 4 – 5 …)" in text


@pytest.mark.parametrize("hatch", ["rising", "falling", "dots", "cross"])
def test_hatch_is_clipped_to_its_shape(hatch):
    lines = draw(Box(0, 0, 12, 6, "#ffffff", hatch=hatch))

    assert lines[1].startswith("q /G gs 0 0 m 12 0 l 12 6 l 0 6 l h W n")
    assert lines[-1] == "Q"
    assert len(lines) == 5


def test_real_pictures_are_written():
    for scene in (
        lay_out_pipe(outline_of("unet"), title="U-Net"),
        lay_out_timeline(lowered_timeline("ZBVZeroBubble"), Options(title="ZBV")),
    ):
        lines = content_of(write_pdf(scene))

        assert sum(line.startswith("BT") for line in lines) == sum(
            isinstance(item, Label) for item in scene.items
        )
        assert all("nan" not in line and "inf" not in line for line in lines)
