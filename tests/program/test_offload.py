"""Residuals on the host: where the copies stand, what they cost, what is refused."""

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import (
    Kind,
    Program,
    StageCost,
    StageCosts,
    find_faults,
    lower,
    simulate,
    validate,
)
from fxpipe.program.generators import SCHEDULES, get_schedule
from fxpipe.program.offload import add_offloads


def test_copies_stand_behind_the_forward_and_before_the_backward():
    program = Program.parse("rank 0: 0F0 0F1 0F2 0B0 0B1 0B2")

    ranks = [add_offloads(list(program.ranks[0]), 2)]

    made = Program.of(program.placement, 3, ranks)
    assert str(made) == (
        "rank 0: 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0RELOAD1 0B0 0RELOAD2 0B1 0B2"
    )


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "ForwardOnly"])
@pytest.mark.parametrize("distance", [2, 5])
def test_every_schedule_is_valid_and_reads_back(name, distance):
    info = get_schedule(name)
    program = info(4, 4 if info.stages_per_rank == (1, 1) else 8, 8)

    lowered = lower(program, offload=distance, reduce_grad=True, max_unsharded=2)

    validate(lowered)
    assert Program.from_csv(lowered.to_csv()).ranks == lowered.ranks
    kinds = [action.kind for actions in lowered.ranks for action in actions]
    assert kinds.count(Kind.OFFLOAD) == kinds.count(Kind.RELOAD) > 0
    without = lower(program, reduce_grad=True, max_unsharded=2)
    kept = [[a for a in actions if not a.kind.is_offload] for actions in lowered.ranks]
    assert kept == [list(actions) for actions in without.ranks]


def costs_of(program, **more):
    stage = StageCost(residual=1.0, **more)
    return StageCosts((stage,) * program.num_stages)


def test_free_copies_save_memory_and_cost_no_time():
    program = get_schedule("1F1B")(8, 8, 16)

    plain = simulate(lower(program), costs_of(program))
    moved = simulate(lower(program, offload=2), costs_of(program))

    assert moved.makespan == plain.makespan
    assert max(plain.peak_memory) == 8
    assert max(moved.peak_memory) <= 4
    assert all(curve[-1][1] == pytest.approx(0) for curve in moved.memory if curve)


def test_slow_copies_show_in_the_time():
    program = get_schedule("1F1B")(4, 4, 8)
    lowered = lower(program, offload=2)

    times = [simulate(lowered, costs_of(program, offload=t)).makespan for t in (0.0, 0.2, 2.0, 6.0)]

    assert times[0] <= times[1] < times[2] < times[3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0OFFLOAD0 0F0 0B0",
            "0OFFLOAD0: its residual is not made yet here, and must be on the dev",
        ),
        ("0F0 0OFFLOAD0 0B0", "0B0: its residual is on the host here, and must be on the device"),
        ("0F0 0RELOAD0 0B0", "0RELOAD0: its residual is on the device here, and must be on the ho"),
        ("0F0 0B0 0OFFLOAD0", "0OFFLOAD0: its residual is used up here"),
    ],
)
def test_misplaced_copies_are_faults(text, message):
    program = Program.parse(f"rank 0: {text}")

    assert message in "\n".join(map(str, find_faults(program)))


def test_too_short_a_distance_is_refused():
    with pytest.raises(ScheduleError, match="offload must be at least 2 compute actions, got 1"):
        lower(get_schedule("1F1B")(2, 2, 4), offload=1)
    with pytest.raises(ScheduleError, match="OFFLOAD needs a microbatch"):
        Program.parse("rank 0: 0F0 0OFFLOAD 0B0")
