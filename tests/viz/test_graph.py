import sys
import xml.etree.ElementTree as ET

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.viz import draw_pipe, pipe_dot, pipe_svg
from tests.viz.pipes import pipe_of, sizes_of

STARTS = {
    "svg": b"<?xml",
    "png": b"\x89PNG",
    "pdf": b"%PDF-",
    "dot": b"digraph pipe {",
    "gv": b"digraph pipe {",
    "mmd": b"flowchart TD",
    "md": b"```mermaid\nflowchart TD",
}


@pytest.mark.parametrize("ending", STARTS)
@pytest.mark.parametrize("engine", ["columns", "dot"])
def test_ending_chooses_the_format(ending, engine, tmp_path):
    path = draw_pipe(pipe_of("unet"), tmp_path / f"a.{ending}", engine=engine, title="U-Net")

    assert path.read_bytes().startswith(STARTS[ending])


@pytest.mark.parametrize("engine", ["columns", "dot"])
@pytest.mark.parametrize("depth", ["stages", "blocks", "nodes"])
def test_svg_says_what_there_is_at_every_depth(depth, engine, tmp_path):
    if (depth, engine) == ("nodes", "columns"):
        engine = None
    path = draw_pipe(
        pipe_of("gpt"),
        tmp_path / "a.svg",
        depth=depth,
        engine=engine,
        flops=[1e9, 2e9, 3e9, 4e9],
        sizes=sizes_of("gpt"),
    )

    words = " ".join(" ".join(ET.parse(path).getroot().itertext()).split())
    for expected in ("stage 3", "40.0% of", "GFLOPs", "blocks.1", "2.05 kB", "tokens.weight"):
        assert expected in words.replace("\xa0", " "), expected
    assert path.stat().st_size < 300_000


def test_few_stages_show_blocks_and_many_do_not():
    assert "subgraph cluster_3" in pipe_dot(pipe_of("gpt"))
    assert "subgraph" not in pipe_dot(pipe_of("gpt", 9))
    assert pipe_svg(pipe_of("gpt"), depth="blocks") == pipe_svg(pipe_of("gpt"))


def test_unknown_ending_lists_the_known_ones(tmp_path):
    with pytest.raises(FxpipeError, match=r"'a\.jpg'.*must end with one of \.svg, \.png, \.pdf"):
        draw_pipe(pipe_of("gpt"), tmp_path / "a.jpg")


def test_unknown_engine_is_refused(tmp_path):
    with pytest.raises(FxpipeError, match="engine is columns or dot, got 'neato'"):
        draw_pipe(pipe_of("gpt"), tmp_path / "a.svg", engine="neato")


def test_nodes_are_for_graphviz(tmp_path):
    with pytest.raises(FxpipeError, match='for nodes use engine="dot"'):
        draw_pipe(pipe_of("gpt"), tmp_path / "a.svg", depth="nodes", engine="columns")
    with pytest.raises(FxpipeError, match="laid out by Graphviz: use draw_pipe"):
        pipe_svg(pipe_of("gpt"), depth="nodes")


def test_missing_program_is_named_and_not_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(FxpipeError, match=r"its program dot, which was not found.*apt install"):
        draw_pipe(pipe_of("gpt"), tmp_path / "a.svg", depth="nodes")
    for ending in ("svg", "png", "pdf", "dot", "md"):
        draw_pipe(pipe_of("gpt"), tmp_path / f"a.{ending}")


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)

    with pytest.raises(
        FxpipeError, match=r"needs the graphviz package: pip install 'fxpipe\[viz\]'"
    ):
        draw_pipe(pipe_of("gpt"), tmp_path / "a.svg", engine="dot")


def test_inline_svg_has_no_header():
    text = pipe_svg(pipe_of("unet"), title="here")

    assert text.startswith("<svg ")
    assert "<title>here</title>" in text


def test_pipe_draws_itself(tmp_path):
    pipe = pipe_of("gpt")

    known = {"flops": pipe.flops(), "sizes": pipe.info().example_sizes}
    assert pipe.draw(tmp_path / "a.dot").read_text() == pipe_dot(pipe, **known)
    assert pipe._repr_svg_() == pipe_svg(pipe, **known)
    assert pipe.draw(tmp_path / "a.dot", flops=None, sizes={"batch": 9}).read_text() == pipe_dot(
        pipe, sizes={"batch": 9}
    )
