"""Slots of activations: as few as the most that live at once, and never two in one."""

import itertools

import pytest

from fxpipe import (
    LocalGroup,
    PipelineActivationLiveness,
    PipelineScheduleMulti,
    PipelineStage,
    ScheduleError,
    analyze_pipeline_activation_liveness,
    get_schedule_class,
)
from fxpipe.program import StageCost, StageCosts, simulate
from tests.runtime.stages import Block


def schedule(name, ranks, per_rank, microbatches):
    group, count = LocalGroup(ranks), ranks * per_rank
    stages = [PipelineStage(Block(), i, count, "cpu", group=group) for i in range(count)]
    return get_schedule_class(name)(stages, microbatches)


def own(order, microbatches, num_stages=1):
    stages = [PipelineStage(Block(), i, num_stages, "cpu") for i in range(num_stages)]
    made = PipelineScheduleMulti(stages, microbatches)
    made.pipeline_order = {0: order.split()}
    return made


def analyze(made, rank=0, stages=(0,), granularity="stage_microbatch"):
    return analyze_pipeline_activation_liveness(
        made, pp_rank=rank, stage_indices=stages, granularity=granularity
    )


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "LoopedBFS"])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_slots_are_as_many_as_residuals_at_once_and_overlapping_lives_differ(name, microbatches):
    made = schedule(name, 2, 2, microbatches)
    order = made.pipeline_order_with_comms
    for rank in range(2):
        mine = [s for s, r in made.stage_index_to_group_rank.items() if r == rank]

        plan = analyze(made, rank, mine)

        assert isinstance(plan, PipelineActivationLiveness)
        keys = list(itertools.product(mine, range(microbatches)))
        lives = {key: plan.get_activation_lifetime(*key) for key in keys}
        most = max(
            sum(start <= at <= end for start, end in lives.values())
            for at in range(len(order[rank]))
        )
        assert plan.num_slots == most
        for one, other in itertools.combinations(keys, 2):
            (a, b), (c, d) = lives[one], lives[other]
            if a <= d and c <= b:
                assert plan.slot_for(*one) != plan.slot_for(*other)


def test_without_pairs_the_slots_are_the_peak_of_the_memory_curve():
    made = schedule("Interleaved1F1B", 2, 2, 8)
    costs = StageCosts((StageCost(residual=1.0),) * 4)
    peaks = simulate(made.program, costs).peak_memory

    for rank, stages in ((0, (0, 2)), (1, (1, 3))):
        assert analyze(made, rank, stages).num_slots == peaks[rank]


def test_a_slot_is_used_again_after_the_weight_half():
    made = own("0F0 0F1 0I0 0F2 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3", 4)

    plan = analyze(made)

    slots = plan.slot_by_stage_and_microbatch
    assert slots == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 0}
    assert plan.get_activation_lifetime(0, 0) == (0, 4)
    assert plan == analyze(made)


def test_stages_of_a_microbatch_may_share_a_slot():
    made = own("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1", 2, num_stages=2)

    plan = analyze(made, stages=(0, 1), granularity="microbatch")

    assert plan.num_slots == 2
    assert plan.slot_for(0, 1) == plan.slot_for(1, 1) == 1
    assert plan.get_activation_lifetime(1, 0) == (0, 4)


@pytest.mark.parametrize(
    ("order", "options", "message"),
    [
        ("0F0", {"granularity": "layer"}, "Unsupported"),
        ("0F0", {"stages": ()}, "must not be empty"),
        ("0F0", {"stages": (0, 0)}, "must be unique"),
        ("0F0", {"rank": 1}, "not present"),
        ("0F1", {}, "outside"),
        ("0F0 0F0", {}, "multiple forwards"),
        ("0F0 0I0 0I0", {}, "multiple input backwards"),
        ("0F0 0B0 0W0", {}, "multiple release actions"),
        ("0B0", {}, "Forward actions"),
        ("0F0", {}, "Backward release actions"),
        ("0F0 0W0", {}, "without input backward"),
        ("0B0 0F0", {}, "ends before its forward"),
    ],
)
def test_orders_without_one_life_for_each_activation_are_refused(order, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        analyze(own(order, 1), **options)
    assert isinstance(raised.value, ScheduleError)
