"""Sizes that a schedule is not defined for are refused with the nearest legal ones."""

from __future__ import annotations

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program.generators import (
    SCHEDULES,
    forward_only_on,
    interleaved_one_f_one_b,
    one_f_one_b,
    zbv,
)
from fxpipe.program.program import Placement


def test_wrong_number_of_stages_names_the_right_one():
    with pytest.raises(
        ScheduleError,
        match=r"1F1B .* exactly 1 stage on each rank, got 6 stages on 4 ranks; "
        r"the nearest legal number of stages on 4 ranks is 4$",
    ):
        one_f_one_b(4, 6, 8)
    with pytest.raises(ScheduleError, match=r"got 6 stages on 4 ranks; .* on 4 ranks is 8$"):
        zbv(4, 6, 8)


def test_uneven_stages_name_both_neighbours():
    with pytest.raises(ScheduleError, match=r"got 10 stages on 4 ranks; .* is 8 or 12$"):
        interleaved_one_f_one_b(4, 10, 8)
    with pytest.raises(ScheduleError, match=r"got 3 stages on 4 ranks; .* is 4$"):
        interleaved_one_f_one_b(4, 3, 8)


@pytest.mark.parametrize("info", SCHEDULES.values(), ids=SCHEDULES)
def test_all_faults_are_reported_together(info):
    with pytest.raises(ScheduleError) as caught:
        info(0, -2, 0)

    message = str(caught.value)
    assert message.startswith(f"{info.name} is not defined for these sizes")
    assert "num_ranks is 0; the nearest legal number is 1" in message
    assert "num_microbatches is 0; the nearest legal number is 1" in message
    assert "num_stages is -2" in message


@pytest.mark.parametrize("sizes", [(2.0, 2, 3), (2, 2, True), (2, 2, "3"), (2, None, 3)])
def test_counts_are_integers(sizes):
    with pytest.raises(ScheduleError, match="GPipe is not defined for these sizes"):
        SCHEDULES["GPipe"](*sizes)


def test_forward_only_on_a_placement_needs_a_microbatch():
    with pytest.raises(ScheduleError, match="at least 1 microbatch, got num_microbatches=0"):
        forward_only_on(Placement.loop(2, 2), 0)
