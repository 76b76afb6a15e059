import json
import xml.etree.ElementTree as ET

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.program import Program, simulate
from fxpipe.program.generators import SCHEDULES
from fxpipe.viz import draw_program, draw_timeline, stretch, timeline_svg, timeline_text
from tests.viz.timelines import program_of, timeline_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_is_well_formed_and_small(name, tmp_path):
    path = draw_timeline(timeline_of(name), tmp_path / "a.svg", title=name)

    assert ET.parse(path).getroot().find("{*}title").text == name
    assert path.stat().st_size < 300_000


def test_ending_chooses_the_format(tmp_path):
    timeline = timeline_of("1F1B")

    draw_timeline(timeline, tmp_path / "a.PNG")
    draw_timeline(timeline, tmp_path / "a.json")
    draw_timeline(timeline, str(tmp_path / "a.txt"))

    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["makespan"] == 33
    assert (tmp_path / "a.txt").read_text() == timeline_text(timeline)


def test_unknown_ending_lists_the_known_ones(tmp_path):
    with pytest.raises(
        FxpipeError, match=r"'a\.gif'.*must end with one of \.svg, \.png, \.pdf, \.json, \.txt"
    ):
        draw_timeline(timeline_of("1F1B"), tmp_path / "a.gif")


def test_measured_must_have_the_same_ranks(tmp_path):
    with pytest.raises(FxpipeError, match="measured timeline has 2 ranks, the simulated one 4"):
        draw_timeline(timeline_of("1F1B"), tmp_path / "a.svg", measured=timeline_of("1F1B", 2))


def test_measured_is_drawn_in_every_format(tmp_path):
    timeline, measured = timeline_of("1F1B"), timeline_of("GPipe")

    for ending in ("svg", "txt", "json"):
        path = draw_timeline(timeline, tmp_path / f"a.{ending}", measured=measured)
        assert "measured" in path.read_text()


def test_program_is_simulated_and_named(tmp_path):
    path = draw_program(program_of("Interleaved1F1B"), tmp_path / "a.txt")

    assert path.read_text().startswith("Interleaved1F1B, 4 ranks, 8 stages, 8 microbatches\n")


def test_stretched_timeline_has_the_same_shares():
    timeline = timeline_of("1F1B")

    longer = stretch(timeline, 2.5)

    assert longer.makespan == 2.5 * timeline.makespan
    assert longer.idle == pytest.approx(timeline.idle)
    assert longer.peak_memory == timeline.peak_memory
    assert set(longer.critical_path) <= set(longer.spans)


@pytest.mark.parametrize("factor", [0, -1, float("nan")])
def test_senseless_factor_is_refused(factor):
    with pytest.raises(FxpipeError, match="a factor above 0"):
        stretch(timeline_of("1F1B"), factor)


def test_inline_svg_fits_its_page():
    text = timeline_svg(timeline_of("1F1B"), title="here", time_unit="ms")

    assert text.startswith("<svg ")
    assert "max-width:100%" in text
    assert "33 ms" in text


def test_objects_draw_themselves(tmp_path):
    program = program_of("1F1B")

    assert program.draw(tmp_path / "a.svg").read_text().startswith("<?xml")
    assert simulate(program).draw(tmp_path / "b.txt").read_text().startswith("makespan 33")
    assert "1F1B, 4 ranks, 8 microbatches" in program._repr_svg_()
    assert simulate(program)._repr_svg_().startswith("<svg ")


def test_program_that_cannot_run_shows_as_text():
    assert Program.parse("rank 0: 0B0 0F0")._repr_svg_() is None
