"""What holds for every schedule at every size.

The quick grid runs always; the whole one, marked `full`, in `make test-full`.
"""

from __future__ import annotations

import pytest

from fxpipe.program.action import Kind
from fxpipe.program.check.validate import validate
from fxpipe.program.generators import SCHEDULES, ScheduleInfo, forward_only_on
from fxpipe.program.lower import lower
from fxpipe.program.play.walk import step_table
from fxpipe.program.program import Placement, Program
from fxpipe.program.simulate import simulate

QUICK_RANKS = (1, 2, 3, 4)
QUICK_MICROBATCHES = (1, 2, 5, 9)
FULL_RANKS = range(2, 9)
FULL_MICROBATCHES = range(1, 25)
STAGES_PER_RANK = (1, 2, 3, 4)

every_schedule = pytest.mark.parametrize("info", SCHEDULES.values(), ids=SCHEDULES)


def stages_per_rank_of(info: ScheduleInfo) -> list[int]:
    return [v for v in STAGES_PER_RANK if info.allows(v)]


def check_valid_everywhere(program: Program) -> None:
    validate(program)
    for receives in ("early", "late"):
        lowered = lower(program, receives=receives)
        for streams in ("pair", "direction"):
            validate(lowered, streams=streams)


@every_schedule
@pytest.mark.parametrize("num_ranks", QUICK_RANKS)
def test_programs_are_valid(info, num_ranks):
    for stages_per_rank in stages_per_rank_of(info):
        for num_microbatches in QUICK_MICROBATCHES:
            check_valid_everywhere(info(num_ranks, num_ranks * stages_per_rank, num_microbatches))


@pytest.mark.full
@every_schedule
@pytest.mark.parametrize("num_ranks", FULL_RANKS)
def test_programs_are_valid_on_the_whole_grid(info, num_ranks):
    for stages_per_rank in stages_per_rank_of(info):
        for num_microbatches in FULL_MICROBATCHES:
            check_valid_everywhere(info(num_ranks, num_ranks * stages_per_rank, num_microbatches))


@every_schedule
def test_more_than_four_stages_per_rank(info):
    if info.allows(7):
        for num_ranks, num_microbatches in ((1, 3), (2, 1), (3, 8), (5, 7)):
            check_valid_everywhere(info(num_ranks, 7 * num_ranks, num_microbatches))


@every_schedule
def test_programs_are_the_same_each_time(info):
    num_stages = 3 * info.stages_per_rank[0]

    assert info(3, num_stages, 7) == info(3, num_stages, 7)


@every_schedule
def test_work_is_complete(info):
    # Written apart from the validator: each stage and microbatch once per kind.
    num_stages = 3 * info.stages_per_rank[-1] if info.stages_per_rank[-1] else 9
    program = info(3, num_stages, 5)

    done = sorted(
        (part.kind, part.stage, part.microbatch)
        for actions in program.ranks
        for action in actions
        for part in (action.parts or (action,))
    )
    all_work = [(s, m) for s in range(num_stages) for m in range(5)]
    forwards = [(s, m) for k, s, m in done if k is Kind.FORWARD]
    inputs = [(s, m) for k, s, m in done if k in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
    weights = [(s, m) for k, s, m in done if k in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)]
    assert forwards == all_work
    assert sorted(inputs) == sorted(weights) == ([] if info.name == "ForwardOnly" else all_work)


@every_schedule
def test_pairs_never_hold_two_halves_that_depend_on_each_other(info):
    if not info.name.startswith("DualPipeV"):
        return
    pairs = 0
    for num_ranks in (1, 2, 4):
        program = info(num_ranks, 2 * num_ranks, 11)
        for actions in program.ranks:
            for action in actions:
                if action.parts:
                    forward, backward = action.parts
                    pairs += 1
                    assert forward.kind is Kind.FORWARD and backward.kind is Kind.BACKWARD
                    assert forward.microbatch > backward.microbatch
                    assert (action.stage, action.microbatch) == forward[1:3]
    assert pairs > 0


PLACEMENTS = (
    Placement.loop(3, 7),
    Placement.v(3, 6),
    Placement.v(2, 7),
    Placement(3, (2, 0, 1)),
    Placement(2, (1, 1, 0, 0, 1, 0)),
    Placement(1, (0, 0, 0)),
)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.stage_to_rank))
def test_forward_only_is_valid_on_any_placement(placement):
    for num_microbatches in (1, 2, 3, 8):
        program = forward_only_on(placement, num_microbatches)

        check_valid_everywhere(program)
        assert program.placement == placement
        assert sum(map(len, program.ranks)) == placement.num_stages * num_microbatches


def test_forward_only_on_a_v_fills_the_ranks():
    timeline = simulate(forward_only_on(Placement.v(4, 8), 16))

    # The last rank starts after three stages, the last microbatch leaves three later:
    # two idle stages for each of the 2 * 16 that a rank computes.
    assert timeline.makespan == pytest.approx((2 * 16 + 2 * 3) / 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", ["loop", "two loops", "v", "two vs"])
def test_in_rounds_no_rank_waits_for_a_token(num_ranks: int, shape: str) -> None:
    # Slots without work, from the first action of a rank to its last. To fill and to leave a
    # pipeline takes some; what counts is that more rounds do not add to them.
    depth = num_ranks * {"loop": 1, "two loops": 2, "v": 2, "two vs": 4}[shape]
    make = Placement.loop if "loop" in shape else Placement.v
    placement = make(num_ranks, depth)
    for count in range(num_ranks, 2 * num_ranks + 2):
        for rounds in (12, 24):
            longer = Placement(num_ranks, placement.stage_to_rank * rounds)
            table = step_table(forward_only_on(longer, count, rounds=rounds))

            busy = [[at for at, action in enumerate(row) if action] for row in table]
            idle = [found[-1] - found[0] + 1 - len(found) for found in busy]
            assert max(idle) <= (0 if "loop" in shape else 2 * (num_ranks - 1)), (count, rounds)
