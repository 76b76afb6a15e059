import io
from textwrap import dedent

import pytest
from rich.console import Console

from fxpipe.program import Program, Timeline, simulate
from fxpipe.program.generators import SCHEDULES
from fxpipe.viz.timeline_picture.terminal import TimelineView, timeline_text
from tests.viz.timelines import lowered_timeline, sharded_timeline, timeline_of


def test_one_stage_per_rank_shows_microbatches():
    text = timeline_text(timeline_of("GPipe", 2, 3), title="GPipe")

    assert text == dedent("""\
        GPipe
        makespan 12, idle 25.0%, peak memory 3
        rank 0 |F0-F1-F2-         B0====B1====B2====|  25% idle  peak 3
        rank 1 |   F0-F1-F2-B0====B1====B2====      |  25% idle  peak 3
                0              5              10
        F- forward  B= backward
        """)


def test_several_stages_per_rank_show_the_stage():
    text = timeline_text(timeline_of("ZBVZeroBubble", 2, 2))

    assert text == dedent("""\
        makespan 6.5, idle 7.7%, peak memory 2
        rank 0 |0F0-0F1-    3F0-3I0~3F1-3I1~0I0~3W0.0I1~3W1.0W0.0W1.|   8% idle  peak 2
        rank 1 |    1F0-2F0-1F1-2F1-2I0~1I0~2I1~1I1~2W0.1W0.2W1.1W1.|   8% idle  peak 2
                0               2               4               6
        F- forward  I~ backward, input half  W. backward, weight half
        """)


def test_narrow_terminal_keeps_steps_of_equal_width():
    text = timeline_text(timeline_of("1F1B", 4, 8), width=80)

    assert text == dedent("""\
        makespan 33, idle 27.3%, peak memory 4
        rank 0 |F0F1F2F3            B0==F4B1==F5B2==F6B3==F7B4==  B5==  B6==  B7==|
        rank 1 |  F0F1F2        B0==F3B1==F4B2==F5B3==F6B4==F7B5==  B6==  B7==    |
        rank 2 |    F0F1    B0==F2B1==F3B2==F4B3==F5B4==F6B5==F7B6==  B7==        |
        rank 3 |      F0B0==F1B1==F2B2==F3B3==F4B4==F5B5==F6B6==F7B7==            |
                0                   10                  20                  30
        F- forward  B= backward
        """)


def test_pairs_name_both_parts():
    program = Program.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1")

    text = timeline_text(simulate(program))

    assert "F0---F1B0++++++++++B1---" not in text
    assert "F1B0+" in text
    assert "P+ pair" in text


def test_transfers_have_a_line_of_their_own():
    lines = timeline_text(lowered_timeline("1F1B")).splitlines()

    assert set(lines[2].strip()) <= set("<>* ")
    assert "> activation, < gradient in transfer" in lines[-1]


def test_parameters_are_marked():
    text = timeline_text(sharded_timeline())

    assert "# parameters gathered or reduced" in text
    assert any(set(line.strip()) >= {"#"} and "|" not in line for line in text.splitlines()[1:])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 100, 250])
def test_no_line_is_wider_than_the_terminal(name, width):
    rows = [
        line for line in timeline_text(timeline_of(name), width=width).splitlines() if "|" in line
    ]

    assert len(rows) == 4
    assert all(len(row) <= width for row in rows)
    assert len({row.rindex("|") for row in rows}) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_natural_width_labels_every_action(name):
    timeline = timeline_of(name)

    text = timeline_text(timeline)

    for rank in range(timeline.num_ranks):
        row = next(line for line in text.splitlines() if line.startswith(f"rank {rank} |"))
        for span in timeline.of_rank(rank):
            for part in span.action.parts or (span.action,):
                short = f"{part.kind.text}{part.microbatch}"
                assert str(part) in row or short in row


def test_nothing_to_show_is_shown():
    text = timeline_text(Timeline(2, (), ((), ()), ()))

    assert text.startswith("makespan 0, idle 0.0%\nrank 0 |")


def test_colours_repeat_what_the_text_says():
    timeline = timeline_of("ZBH1", 2, 2)
    colour, plain = io.StringIO(), io.StringIO()

    Console(file=colour, force_terminal=True, color_system="truecolor", width=100).print(
        TimelineView(timeline, "ZBH1")
    )
    Console(file=plain, width=100).print(TimelineView(timeline, "ZBH1"))

    assert colour.getvalue().count("\x1b[38;2;27;31;37;48;2;") == len(timeline.spans)
    stripped = "\n".join(line.rstrip() for line in plain.getvalue().splitlines()) + "\n"
    assert stripped == timeline_text(timeline, width=100, title="ZBH1")
