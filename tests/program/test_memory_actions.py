"""Parameters are gathered ahead, gradients reduced once, residuals copied to the host and back."""

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
from fxpipe.program.memory_actions import add_offloads
from tests.program.grid import programs

ONE_F_ONE_B = Program.parse("""
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
""")


def test_gradients_are_reduced_once_after_the_last_one_and_its_sends():
    lowered = lower(ONE_F_ONE_B, reduce_grad=True)

    assert str(lowered).splitlines()[0].endswith("0RECV_B2 0B2 0REDUCE_GRAD")
    assert str(lowered).splitlines()[1].endswith("1B2 1SEND_B2 1REDUCE_GRAD")
    assert str(lowered).count("REDUCE_GRAD") == 2


def test_a_forward_only_program_reduces_nothing():
    program = Program.parse("rank 0: 0F0\nrank 1: 1F0")

    assert "REDUCE" not in str(lower(program, reduce_grad=True))


LOOPED = Program.parse("""
    rank 0: 0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 5F0 5F1 5B0 5B1 3B0 3B1 1B0 1B1
""")


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (
            1,
            "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2RESHARD 4UNSHARD 4F0 4F1 4B0 4B1 "
            "4RESHARD 2UNSHARD 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD",
        ),
        (
            2,
            "0UNSHARD 2UNSHARD 0F0 0F1 0RESHARD 4UNSHARD 2F0 2F1 4F0 4F1 4B0 4B1 4RESHARD 0UNSHARD "
            "2B0 2B1 2RESHARD 0B0 0B1 0RESHARD",
        ),
        (
            3,
            "0UNSHARD 2UNSHARD 4UNSHARD 0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 4RESHARD 2B0 2B1 2RESHARD "
            "0B0 0B1 0RESHARD",
        ),
    ],
)
def test_the_next_stages_are_unsharded_ahead_within_the_bound(bound, expected):
    lowered = lower(LOOPED, max_unsharded=bound)

    without_transfers = " ".join(str(a) for a in lowered.ranks[0] if not a.kind.is_transfer)
    assert without_transfers == expected


def test_unsharding_starts_before_the_receives_that_follow():
    lowered = lower(LOOPED, max_unsharded=1)

    assert str(lowered).splitlines()[1].startswith("rank 1: 1UNSHARD 1RECV_F0 1RECV_F1 1F0")


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("bound", [1, 2, 3])
def test_the_bound_on_unsharded_stages_holds(name, bound):
    program = programs()[name]
    if bound == 1 and "OVERLAP" in str(program):
        with pytest.raises(ScheduleError, match="needs 2 stages unsharded at once, but max_unsh"):
            lower(program, max_unsharded=bound)
        return

    for actions in lower(program, max_unsharded=bound).ranks:
        unsharded = set()
        for action in actions:
            if action.kind is Kind.UNSHARD:
                unsharded.add(action.stage)
            elif action.kind is Kind.RESHARD:
                unsharded.remove(action.stage)
            assert len(unsharded) <= bound
        assert not unsharded


def test_a_lookahead_gathers_later_and_keeps_as_many():
    lowered = lower(LOOPED, max_unsharded=3, unshard_lookahead=[1, 2])

    without_transfers = [
        " ".join(str(a) for a in actions if not a.kind.is_transfer) for actions in lowered.ranks
    ]
    assert without_transfers[0] == (
        "0UNSHARD 0F0 0F1 2UNSHARD 2F0 2F1 4UNSHARD 4F0 4F1 4B0 4B1 4RESHARD 2B0 2B1 2RESHARD "
        "0B0 0B1 0RESHARD"
    )
    assert without_transfers[1].startswith("1UNSHARD 3UNSHARD 1F0 1F1 5UNSHARD 3F0")


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize(("bound", "ahead"), [(3, 2), (2, 1), (3, 1)])
def test_with_a_lookahead_every_stage_is_there_when_it_is_used(name, bound, ahead):
    program = programs()[name]
    if ahead == 1 and "OVERLAP" in str(program):
        with pytest.raises(ScheduleError, match="and the lookahead 1"):
            lower(program, max_unsharded=bound, unshard_lookahead=[ahead] * program.num_ranks)
        return

    lowered = lower(program, max_unsharded=bound, unshard_lookahead=[ahead] * program.num_ranks)

    for actions in lowered.ranks:
        unsharded = set()
        for action in actions:
            if action.kind is Kind.UNSHARD:
                unsharded.add(action.stage)
            elif action.kind is Kind.RESHARD:
                unsharded.remove(action.stage)
            elif action.kind.is_compute or action.parts:
                assert {part.stage for part in action.parts or (action,)} <= unsharded
            assert len(unsharded) <= bound
        assert not unsharded


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
