import random

import pytest

from fxpipe.errors import PlanError, ScheduleError
from fxpipe.planner.order.improve import improve, named_starts
from fxpipe.planner.order.orders import Orders
from fxpipe.planner.order.schedule_bound import lower_bound
from fxpipe.program import (
    Edges,
    Kind,
    Link,
    Program,
    StageCost,
    StageCosts,
    lower,
    simulate,
    validate,
)
from fxpipe.program.generators import SCHEDULES
from tests.planner.order.exact import optimum

TRAINING = [name for name in SCHEDULES if name != "ForwardOnly"]


def uneven(num_stages, seed, *, activation=0.0, link=None):
    """Stages that differ by up to three times."""
    rng = random.Random(seed)
    stages = tuple(
        StageCost(rng.uniform(0.4, 1.2), rng.uniform(0.4, 1.4), rng.uniform(0.2, 0.8), residual=0.5)
        for _ in range(num_stages)
    )
    return StageCosts(stages, activation=activation, link=link or Link())


def all_named(num_ranks, num_microbatches, **times):
    """Every named schedule with one, two and four stages per rank, with uniform costs."""
    for name in TRAINING:
        for per_rank in (1, 2, 4):
            if SCHEDULES[name].allows(per_rank):
                program = SCHEDULES[name](num_ranks, per_rank * num_ranks, num_microbatches)
                yield program, StageCosts.uniform(program.placement, **times)


def test_at_least_as_good_as_every_named_schedule_that_fits():
    # p=8, m=32, F:I:W = 1:1.4:0.6 with the memory of ZBV. Two stages per rank from ZBV:
    # 101.3 against 101.6, and nothing below 100.9 is possible. Four stages per rank are
    # another division of the model: the best of them starts at 99.15.
    times = {"forward": 1.0, "backward_input": 1.4, "backward_weight": 0.6}
    named = list(all_named(8, 32, **times))
    zbv, costs = next(c for c in named if c[0].name == "ZBVZeroBubble")
    limit = max(simulate(zbv, costs).peak_memory)

    from_zbv = improve(zbv, costs, limit, budget=300_000)
    best, its_costs = min(
        (case for case in named if max(simulate(*case).peak_memory) <= limit),
        key=lambda case: simulate(*case).makespan,
    )
    of_all = improve(best, its_costs, limit, budget=100_000, starts=())

    fits = [
        (program.num_stages, timeline.makespan)
        for program, its in named
        if max((timeline := simulate(program, its)).peak_memory) <= limit
    ]
    assert len(fits) >= 8
    assert from_zbv.makespan <= min(time for stages, time in fits if stages <= 16)
    assert of_all.makespan <= min(time for _, time in fits)
    for found in (from_zbv, of_all):
        assert max(found.timeline.peak_memory) <= limit
        assert found.bound <= found.makespan
    assert from_zbv.bound == pytest.approx(100.9)
    assert from_zbv.makespan == pytest.approx(101.3)


@pytest.mark.parametrize("name", TRAINING)
def test_never_worse_and_always_valid(name):
    per_rank = max(SCHEDULES[name].stages_per_rank[0], 1)
    program = SCHEDULES[name](3, 3 * per_rank, 5)
    costs = uneven(program.num_stages, seed=len(name), activation=0.1, link=Link(0.05, 4.0))

    found = improve(program, costs, budget=30_000)

    before = simulate(program, costs)
    validate(found.program)
    validate(lower(found.program))
    assert found.before == before.makespan
    assert found.makespan == simulate(found.program, costs).makespan <= before.makespan
    assert all(
        now <= then * (1 + 1e-9)
        for now, then in zip(found.timeline.peak_memory, before.peak_memory, strict=True)
    )


def test_uneven_stages_leave_something_to_gain():
    program = SCHEDULES["ZBVZeroBubble"](4, 8, 8)
    costs = uneven(8, seed=1)

    found = improve(program, costs, budget=300_000)

    assert found.makespan < 0.992 * found.before
    assert "quicker" in str(found)


def test_same_seed_same_program():
    program = SCHEDULES["ZBVZeroBubble"](3, 6, 6)
    costs = uneven(6, seed=2)

    first = improve(program, costs, seed=5, budget=50_000)
    second = improve(program, costs, seed=5, budget=50_000)

    assert first.program == second.program


def test_transfers_that_block_ranks_are_judged_by_the_simulator():
    program = SCHEDULES["1F1B"](3, 3, 4)
    stages = (StageCost(1, 1, 1, residual=1),) * 3
    costs = StageCosts(stages, activation=1.0, link=Link(0.1, 5.0), overlaps_transfers=False)

    found = improve(program, costs, budget=30_000)

    assert found.makespan <= found.before
    assert found.makespan == simulate(found.program, costs).makespan


def test_skip_connections_are_kept():
    program = SCHEDULES["ZBH1"](3, 3, 4)
    edges = Edges.of(3, [(0, 1), (1, 2), (0, 2)])

    found = improve(program, uneven(3, seed=3), edges=edges, budget=30_000)

    validate(found.program, edges)


def test_a_whole_backward_is_split_only_if_a_start_splits():
    program = SCHEDULES["Wave"](2, 8, 3)
    costs = uneven(8, seed=4)

    found = improve(program, costs, budget=20_000, starts=())

    kinds = {action.kind for rank in found.program.ranks for action in rank}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}


def test_memory_that_nothing_fits_into_is_named():
    program = SCHEDULES["1F1B"](4, 4, 8)
    costs = StageCosts.uniform(program.placement)

    with pytest.raises(PlanError, match=r"rank 0 holds 4, may hold 0\.5, missing 3\.5"):
        improve(program, costs, 0.5)
    with pytest.raises(PlanError, match="3 entries, but the program has 4 ranks"):
        improve(program, costs, (1.0, 1.0, 1.0))


def test_lowered_programs_are_refused():
    program = lower(SCHEDULES["1F1B"](2, 2, 2))

    with pytest.raises(ScheduleError, match="improve first, then lower"):
        improve(program, StageCosts.uniform(program.placement))


def test_starts_share_the_placement():
    program = SCHEDULES["ZBVZeroBubble"](3, 6, 4)

    names = {start.name for start in named_starts(program)}

    assert names == {"ZBVZeroBubble", "VHalf", "VMin", "DualPipeVDown", "DualPipeV", "Wave"}


@pytest.mark.parametrize("seed", range(4))
def test_close_to_the_optimum_of_small_programs(seed):
    # 2 ranks x 2 stages x 3 microbatches: small enough to solve exactly.
    program = SCHEDULES["ZBVZeroBubble"](2, 4, 3)
    rng = random.Random(seed)
    stages = tuple(
        StageCost(rng.randint(3, 9), rng.randint(3, 9), rng.randint(1, 6), residual=0.5)
        for _ in range(4)
    )
    costs = StageCosts(stages)

    best = optimum(program, costs, 2.0, seconds=60)
    found = improve(program, costs, 2.0, budget=150_000)

    assert best.is_proven
    assert best.makespan == simulate(best.program, costs).makespan
    assert max(simulate(best.program, costs).peak_memory) <= 2.0
    edges = Edges.chain(4)
    assert lower_bound(program, costs, edges, (2.0, 2.0)) <= best.makespan * (1 + 1e-9)
    assert best.makespan <= found.makespan * (1 + 1e-9)
    assert found.makespan <= best.makespan * 1.02


@pytest.mark.parametrize("name", TRAINING)
def test_lower_bound_is_below_every_named_schedule(name):
    per_rank = max(SCHEDULES[name].stages_per_rank[0], 1)
    for ranks, microbatches, seed in ((2, 5, 0), (4, 3, 1), (5, 11, 2)):
        program = SCHEDULES[name](ranks, ranks * per_rank, microbatches)
        costs = uneven(program.num_stages, seed=seed, activation=0.2, link=Link(0.1, 3.0))
        timeline = simulate(program, costs)

        bound = lower_bound(program, costs, Edges.chain(program.num_stages), timeline.peak_memory)

        assert bound <= timeline.makespan * (1 + 1e-9)


def test_lower_bound_meets_one_f_one_b_with_one_rank():
    program = SCHEDULES["1F1B"](1, 1, 4)
    costs = StageCosts.uniform(program.placement)

    assert lower_bound(program, costs, Edges.chain(1)) == 12


def test_times_of_orders_equal_the_simulator():
    for name in TRAINING:
        per_rank = max(SCHEDULES[name].stages_per_rank[0], 1)
        program = SCHEDULES[name](4, 4 * per_rank, 6)
        costs = uneven(program.num_stages, seed=9, activation=0.2, link=Link(0.1, 3.0))
        orders = Orders(program, costs, Edges.chain(program.num_stages), [1e9] * 4)

        timing = orders.fill(orders.main, [0.5] * 4)

        assert timing is not None
        filled = Program.of(program.placement, 6, timing.ranks)
        assert sorted(a for r in filled.ranks for a in r) == sorted(
            a for r in program.ranks for a in r
        )
        assert timing.length == pytest.approx(simulate(filled, costs).makespan)
        assert timing.critical_path()[-1].microbatch == 0


def test_ranks_that_wait_for_each_other_have_no_time():
    good = SCHEDULES["1F1B"](2, 2, 2)
    stuck = Program.parse("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0")
    orders = Orders(stuck, StageCosts.uniform(good.placement), Edges.chain(2), [1e9] * 2)

    assert orders.fill(orders.main, [0.0] * 2) is None


ZERO_BUBBLE = [
    # Zero Bubble Pipeline Parallelism, tables 5 and 6: microbatches, ms of F, B, W and a transfer,
    # the memory of W over that of B, and the bubble rates of ZB-1p and ZB-2p.
    (24, 18.522, 18.086, 9.337, 0.601, 32 / 87.3, 0.1585, 0.0433),
    (32, 18.513, 18.086, 9.331, 0.626, 32 / 87.3, 0.1242, 0.0039),
    (24, 29.718, 29.444, 19.927, 0.527, 32 / 74.0, 0.1323, 0.0029),
    (32, 29.802, 29.428, 19.530, 0.577, 32 / 74.0, 0.1045, 0.0022),
]


@pytest.mark.parametrize("row", ZERO_BUBBLE)
def test_the_period_reaches_published_bubble_rates(row):
    # One step by itself was the only objective: 0.1022 where 0.0433 is published.
    count, forward, backward, weight, transfer, deferred, *published = row
    stage = StageCost(forward, backward, weight, residual=1.0, deferred=deferred)
    costs = StageCosts((stage,) * 8, activation=1e-9, link=Link(transfer))

    for name, held, rate in zip(("ZBH1", "ZBH2"), (8, 16), published, strict=True):
        found = improve(
            SCHEDULES[name](8, 8, count), costs, held + 1e-6, objective="period", budget=20_000
        )

        work = count * (forward + backward + weight)
        assert 1 - work / found.length <= rate + 0.0015
        assert found.length == found.timeline.period <= found.before
        assert found.bound == pytest.approx(work)


def test_steps_follow_each_other_after_a_period():
    # Two steps in one program: each rank does its second after its first, and nobody waits.
    once = SCHEDULES["ZBH2"](4, 4, 8)
    ranks = [
        [*rank, *(action._replace(microbatch=action.microbatch + 8) for action in rank)]
        for rank in once.ranks
    ]
    twice = Program.of(once.placement, 16, ranks)
    costs = uneven(4, seed=5)

    longer = simulate(twice, costs).makespan - simulate(once, costs).makespan

    assert longer <= simulate(once, costs).period * (1 + 1e-9)
