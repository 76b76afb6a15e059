"""Placements and programs check themselves and print as tables."""

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Placement, Program, lower


def test_a_loop_goes_round_the_ranks():
    placement = Placement.loop(3, 7)

    assert placement.stage_to_rank == (0, 1, 2, 0, 1, 2, 0)
    assert placement.stages_of(0) == (0, 3, 6)


def test_a_v_goes_down_the_ranks_and_up_again():
    placement = Placement.v(3, 9)

    assert placement.stage_to_rank == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert placement.stages_of(2) == (2, 3, 8)


@pytest.mark.parametrize(
    ("num_ranks", "stage_to_rank", "message"),
    [
        (0, (), "at least one rank, got 0"),
        (2, (0, 2, 5), "ranks go from 0 to 1, but stage 1 is on rank 2, stage 2 is on rank 5"),
        (2, (0, -1), "stage 1 is on rank -1"),
        (4, (0, 2), r"no stage is placed on ranks \[1, 3\]"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(num_ranks, stage_to_rank, message):
    with pytest.raises(ScheduleError, match=message):
        Placement(num_ranks, stage_to_rank)


def test_a_program_needs_microbatches_and_a_list_for_each_rank():
    with pytest.raises(ScheduleError, match="needs a microbatch, got 0"):
        Program.of(Placement.loop(1, 1), 0, [[]])
    with pytest.raises(ScheduleError, match="has 2 ranks, the program lists actions for 1"):
        Program.of(Placement.loop(2, 2), 1, [[]])


def test_programs_are_values():
    text = "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"

    assert Program.parse(text) == Program.parse(text)
    assert hash(Program.parse(text)) == hash(Program.parse(text))
    assert Program.parse(text) != lower(Program.parse(text))


def test_a_program_knows_whether_it_has_backwards():
    assert not Program.parse("rank 0: 0F0 0F1").has_backward
    assert Program.parse("rank 0: 0F0 0F1 0B0 0B1").has_backward
    assert Program.parse("rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1").has_backward


def test_a_program_knows_whether_it_is_lowered():
    program = Program.parse("rank 0: 0F0 (0B0;0F1)OVERLAP_F_B 0B1\nrank 1: 1F0 1B0 1F1 1B1")

    assert not program.is_lowered
    assert lower(program).is_lowered
    assert Program.parse("rank 0: 0UNSHARD 0F0 0RESHARD").is_lowered
