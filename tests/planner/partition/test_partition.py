"""`partition` against brute force: all assignments of items to stages, priced independently."""

import itertools
import random

import pytest

from fxpipe.errors import PlanError
from fxpipe.planner.partition.partition import Partition, partition
from fxpipe.planner.partition.work import Flow, Item, Limits, Shared, Work, in_flight
from fxpipe.program import Link, Placement
from fxpipe.program.generators import SCHEDULES


def all_assignments(work, num_stages):
    """Every map of items to stages that follows the data and leaves no stage empty."""
    for stage_of in itertools.product(range(num_stages), repeat=len(work.items)):
        if len(set(stage_of)) == num_stages and all(
            stage_of[flow.source] <= stage_of[target]
            for flow in work.flows
            for target in flow.targets
        ):
            yield stage_of


def rank_loads(work, placement, limits, stage_of):
    loads = [0.0] * placement.num_ranks
    for item, stage in zip(work.items, stage_of, strict=True):
        loads[placement.stage_to_rank[stage]] += item.time
    for flow in work.flows:
        source = stage_of[flow.source]
        for target in {stage_of[t] for t in flow.targets} - {source}:
            ends = placement.stage_to_rank[source], placement.stage_to_rank[target]
            if ends[0] != ends[1]:
                time = limits.links.get(ends, limits.link).time(flow.num_bytes)
                if flow.gradient_bytes:
                    back = limits.links.get(ends[::-1], limits.link)
                    time += back.time(flow.gradient_bytes)
                for end in ends:
                    loads[end] += time
    return loads


def rank_memory(work, placement, limits, stage_of):
    held = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        states, residuals = [], []
        for stage in stages:
            inside = {i for i, s in enumerate(stage_of) if s == stage}
            shared = [s for s in work.shared if inside & set(s.items)]
            states.append(sum(work.items[i].state for i in inside) + sum(s.state for s in shared))
            residuals.append(
                sum(work.items[i].residual for i in inside) + sum(s.residual for s in shared)
            )
        moments = limits.in_flight[rank] if limits.in_flight else [(1,) * len(stages)]
        most = max(sum(n * b for n, b in zip(m, residuals, strict=True)) for m in moments)
        held.append(sum(states) + most)
    return held


def is_allowed(work, placement, limits, stage_of):
    if any(stage_of[item] != stage for item, stage in limits.pins.items()):
        return False
    if any(len({stage_of[item] for item in group}) > 1 for group in limits.together):
        return False
    if limits.memory is None:
        return True
    held = rank_memory(work, placement, limits, stage_of)
    return all(h <= m * (1 + 1e-12) for h, m in zip(held, limits.memory, strict=True))


def brute_force(work, placement, limits):
    """The least slowest rank of all assignments; None if none is allowed."""
    return min(
        (
            max(rank_loads(work, placement, limits, stage_of))
            for stage_of in all_assignments(work, placement.num_stages)
            if is_allowed(work, placement, limits, stage_of)
        ),
        default=None,
    )


def check(work, placement, limits):
    """Compare with brute force; returns whether there was a solution."""
    expected = brute_force(work, placement, limits)
    if expected is None:
        with pytest.raises(PlanError):
            partition(work, placement, limits)
        return False

    found = partition(work, placement, limits)

    assert is_allowed(work, placement, limits, found.stage_of)
    assert found.slowest == pytest.approx(expected, rel=1e-9)
    loads = rank_loads(work, placement, limits, found.stage_of)
    assert found.totals.rank_loads == pytest.approx(loads)
    assert found.is_exact
    assert found.bound <= expected * (1 + 1e-9)
    return True


def random_items(rng, count):
    return tuple(
        Item(f"m{i}", rng.randint(1, 18) + rng.random(), rng.randint(0, 5), rng.randint(0, 3))
        for i in range(count)
    )


def random_limits(rng, work, placement):
    """Any mix of pins, groups, memory, in-flight counts and links."""
    count = len(work.items)
    pins, together, memory, moments = {}, (), None, None
    if rng.random() < 0.3:
        pins = {rng.randrange(count): rng.randrange(placement.num_stages)}
    if rng.random() < 0.3:
        start = rng.randrange(count - 1)
        together = ((start, start + 1),)
    if rng.random() < 0.5:
        total = sum(i.state + 2 * i.residual for i in work.items)
        total += sum(s.state + 2 * s.residual for s in work.shared)
        memory = tuple(total * rng.uniform(0.4, 1.3) for _ in range(placement.num_ranks))
        moments = tuple(
            tuple(tuple(rng.randint(1, 3) for _ in placement.stages_of(rank)) for _ in range(2))
            for rank in range(placement.num_ranks)
        )
    links = {}
    if rng.random() < 0.4:
        links = {
            (a, b): Link(rng.random(), rng.uniform(0.5, 4))
            for a in range(placement.num_ranks)
            for b in range(placement.num_ranks)
            if rng.random() < 0.5
        }
    return Limits(pins, together, memory, moments, Link(0.2, 2.0), links)


@pytest.mark.parametrize("seed", range(140))
def test_random_chains_with_skips_equal_brute_force(seed):
    rng = random.Random(seed)
    count = rng.randint(4, 8)
    flows = [Flow(i, (i + 1,), rng.randint(0, 3), rng.randint(0, 3)) for i in range(count - 1)]
    for _ in range(rng.randint(0, 3)):
        source = rng.randrange(count - 1)
        targets = rng.sample(range(source + 1, count), rng.randint(1, min(3, count - 1 - source)))
        flows.append(Flow(source, tuple(sorted(targets)), rng.randint(0, 4), rng.randint(0, 2)))
    shared = tuple(
        Shared(tuple(sorted(rng.sample(range(count), 2))), rng.randint(0, 4), rng.randint(0, 2))
        for _ in range(rng.randint(0, 2))
    )
    work = Work(random_items(rng, count), tuple(flows), shared)
    placement = Placement.loop(stages := rng.randint(1, 4), stages)

    check(work, placement, random_limits(rng, work, placement))


@pytest.mark.parametrize("seed", range(70))
def test_several_stages_per_rank_equal_brute_force(seed):
    rng = random.Random(1000 + seed)
    count = rng.randint(5, 8)
    flows = [Flow(i, (i + 1,), rng.randint(0, 2), rng.randint(0, 2)) for i in range(count - 1)]
    if rng.random() < 0.5:
        flows.append(Flow(0, (count - 1,), 1.0))
    work = Work(random_items(rng, count), tuple(flows), (Shared((0, count - 1), 2.0),))
    make = rng.choice([Placement.loop, Placement.v])
    placement = make(2, rng.choice([4, 4, 3])) if rng.random() < 0.8 else make(1, 3)

    check(work, placement, random_limits(rng, work, placement))


@pytest.mark.parametrize("seed", range(70))
def test_small_graphs_with_branches_equal_brute_force(seed):
    rng = random.Random(2000 + seed)
    count = rng.randint(4, 7)
    flows = []
    for source in range(count - 1):
        later = range(source + 1, count)
        targets = rng.sample(later, rng.randint(0, min(2, len(later))))
        if targets:
            flows.append(Flow(source, tuple(sorted(targets)), rng.randint(0, 3), 1.0))
    work = Work(random_items(rng, count), tuple(flows))
    placement = rng.choice([Placement.loop(2, 2), Placement.loop(3, 3), Placement.v(2, 4)])

    check(work, placement, random_limits(rng, work, placement))


def test_most_random_cases_have_a_solution():
    # Guards the tests above: limits that rule everything out would make them empty.
    rng = random.Random(7)
    solved = 0
    for _ in range(30):
        work = Work(random_items(rng, 6), tuple(Flow(i, (i + 1,), 1.0) for i in range(5)))
        solved += check(work, Placement.loop(3, 3), random_limits(rng, work, Placement.loop(3, 3)))

    assert 12 <= solved < 30


def test_chain_is_cut_where_the_slowest_stage_is_quickest():
    found = partition(Work.chain([1, 1, 1, 3]), 2)

    assert found.stage_of == (0, 0, 0, 1)
    assert found.slowest == 3
    assert found.imbalance == 1


def test_transfers_count_for_both_ends():
    # Without the price of the wide boundary after item 1 the cut would be in the middle.
    times = (2.0, 2.0, 2.0, 2.0)
    items = tuple(Item(time=time) for time in times)
    flows = (Flow(0, (1,), 1), Flow(1, (2,), 9), Flow(2, (3,), 1))

    found = partition(Work(items, flows), 2, Limits(link=Link(0, 1)))

    assert found.stage_of == (0, 1, 1, 1)
    assert found.totals.rank_loads == (3, 7)


def test_equal_results_are_told_apart_by_evenness():
    # The long item decides the slowest stage; the rest is spread evenly all the same.
    found = partition(Work.chain([9, 1, 1, 1, 1, 1, 1]), 3)

    assert found.stage_of == (0, 1, 1, 1, 2, 2, 2)


def test_branches_may_run_in_another_order_if_that_is_better():
    # Two branches 0-1 and 2-3: cutting across both is more even than any cut of the order.
    items = tuple(Item(time=time) for time in (4, 1, 1, 4))
    work = Work(items, (Flow(0, (1,)), Flow(2, (3,))))

    found = partition(work, 2)

    assert found.slowest == 5
    assert partition(Work.chain([4, 1, 1, 4]), 2).order == "model"


def test_missing_memory_is_named_by_rank_with_the_amount():
    items = tuple(Item(name, time=1.0, state=6e9) for name in ("emb", "a", "b", "head"))

    with pytest.raises(PlanError) as caught:
        partition(Work(items), 2, Limits(memory=(10e9, 10e9)))

    message = str(caught.value)
    assert "rank 0 (stage 0: emb .. a) needs 12 GB, has 10 GB, missing 2 GB" in message
    assert "rank 1 (stage 1: b .. head) needs 12 GB" in message


def test_contradicting_pins_are_named():
    work = Work(tuple(Item(n, time=1.0) for n in "abc"), (Flow(0, (1,)), Flow(1, (2,))))

    with pytest.raises(PlanError, match="a in stage 1, b in stage 0"):
        partition(work, 2, Limits(pins={0: 1, 1: 0}))
    with pytest.raises(PlanError, match="a and c together; these groups leave 0 places to cut"):
        partition(work, 2, Limits(together=((0, 2),)))
    with pytest.raises(PlanError, match="c is pinned to stage 5, but there are 2 stages"):
        partition(work, 2, Limits(pins={2: 5}))
    with pytest.raises(PlanError, match="5 stages need as many items, but there are 3"):
        partition(work, 5)


def test_flows_must_run_forward():
    with pytest.raises(PlanError, match=r"but got flow 1 -> \(0,\)"):
        Work((Item(), Item()), (Flow(1, (0,)),))


def test_in_flight_counts_follow_the_schedule():
    one_f_one_b = SCHEDULES["1F1B"](3, 3, 6)
    gpipe = SCHEDULES["GPipe"](3, 3, 6)

    assert in_flight(one_f_one_b) == (((3,),), ((2,),), ((1,),))
    assert in_flight(gpipe) == (((6,),),) * 3


def test_interleaved_in_flight_lists_each_stage_of_a_rank():
    moments = in_flight(SCHEDULES["ZBVZeroBubble"](2, 4, 8))

    assert all(len(moment) == 2 for rank in moments for moment in rank)
    assert max(sum(moment) for moment in moments[0]) == 4


def test_seventy_layers_on_a_v_of_sixteen_ranks_is_proven():
    layers = [0.3, *[1.0] * 70, 2.2]

    found = partition(Work.chain(layers, boundary=0.02), Placement.v(16, 32),
                      Limits(link=Link(0, 1)))  # fmt: skip

    assert isinstance(found, Partition)
    assert found.is_exact
