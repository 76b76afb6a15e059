import xml.etree.ElementTree as ET

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.viz import draw_pipe, pipe_svg
from tests.viz.pipes import pipe_of, sizes_of

STARTS = {
    "svg": b"<?xml",
    "png": b"\x89PNG",
    "pdf": b"%PDF-",
    "dot": b"digraph pipe {",
    "mmd": b"flowchart TD",
    "md": b"```mermaid\nflowchart TD",
}


@pytest.mark.parametrize("ending", STARTS)
def test_ending_chooses_the_format(ending, tmp_path):
    path = draw_pipe(pipe_of("unet"), tmp_path / f"a.{ending}", title="U-Net")

    assert path.read_bytes().startswith(STARTS[ending])


@pytest.mark.parametrize("depth", ["stages", "blocks", "nodes"])
def test_svg_says_what_there_is_at_every_depth(depth, tmp_path):
    path = draw_pipe(
        pipe_of("gpt"),
        tmp_path / "a.svg",
        depth=depth,
        flops=[1e9, 2e9, 3e9, 4e9],
        sizes=sizes_of("gpt"),
    )

    words = " ".join(" ".join(ET.parse(path).getroot().itertext()).split())
    for expected in ("stage 3", "40.0% of", "GFLOPs", "blocks.1", "2.05 kB", "tokens.weight"):
        assert expected in words.replace("\xa0", " "), expected
    assert path.stat().st_size < 300_000


def test_few_stages_show_blocks_and_many_do_not(tmp_path):
    assert "subgraph" in draw_pipe(pipe_of("gpt"), tmp_path / "a.dot").read_text()
    assert "subgraph" not in draw_pipe(pipe_of("gpt", 9), tmp_path / "a.dot").read_text()
    assert pipe_svg(pipe_of("gpt"), depth="blocks") == pipe_svg(pipe_of("gpt"))


def test_unknown_ending_lists_the_known_ones(tmp_path):
    with pytest.raises(FxpipeError, match=r"'a\.jpg'.*must end with one of \.svg, \.png, \.pdf"):
        draw_pipe(pipe_of("gpt"), tmp_path / "a.jpg")


def test_inline_svg_has_no_header():
    text = pipe_svg(pipe_of("unet"), title="here")

    assert text.startswith("<svg ")
    assert "<title>here</title>" in text


def test_pipe_draws_itself(tmp_path):
    pipe = pipe_of("gpt")

    known = {"flops": pipe.flops(), "sizes": pipe.info().example_sizes}
    assert pipe._repr_svg_() == pipe_svg(pipe, **known)
    drawn = draw_pipe(pipe, tmp_path / "a.dot", **known).read_text()
    assert pipe.draw(tmp_path / "b.dot").read_text() == drawn
    other = draw_pipe(pipe, tmp_path / "a.dot", sizes={"batch": 9}).read_text()
    assert pipe.draw(tmp_path / "b.dot", flops=None, sizes={"batch": 9}).read_text() == other
