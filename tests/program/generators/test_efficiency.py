"""How long ranks wait and how much they hold, against closed forms.

Units: one microbatch of one rank's layers takes 1 for forward, input gradient and
weight gradient each, and holds 1 from its forward to its weight gradient.
"""

from __future__ import annotations

import pytest

from fxpipe.program.costs import StageCosts
from fxpipe.program.generators import (
    SCHEDULES,
    dualpipe_v,
    dualpipe_v_down,
    forward_only,
    get_schedule,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    wave,
    zb_h1,
    zb_h2,
    zbv,
)
from fxpipe.program.lower import lower
from fxpipe.program.simulate import simulate
from fxpipe.program.timeline import Timeline

QUICK = [(p, m) for p in (1, 2, 3, 5) for m in (1, 2, 3, 5, 6, 10, 13)]
FULL = [
    pytest.param([(p, m) for m in range(1, 25)], marks=pytest.mark.full, id=f"full-{p}")
    for p in range(2, 9)
]

sizes = pytest.mark.parametrize("grid", [pytest.param(QUICK, id="quick"), *FULL])


def timeline_of(generator, num_ranks: int, num_microbatches: int, per_rank: int = 1) -> Timeline:
    return simulate(generator(num_ranks, num_ranks * per_rank, num_microbatches))


def peak(timeline: Timeline) -> float:
    return max(timeline.peak_memory)


@pytest.mark.parametrize(
    ("name", "per_rank", "idle_4_8", "idle_8_32"),
    [
        ("GPipe", 1, 27.3, 17.9),
        ("1F1B", 1, 27.3, 17.9),
        ("Interleaved1F1B", 2, 15.8, 9.9),
        ("LoopedBFS", 2, 15.8, 9.9),
        ("Wave", 2, 15.8, 9.9),
        ("ZBH1", 1, 11.1, 6.8),
        ("ZBH2", 1, 11.1, 6.8),
        ("InterleavedZeroBubble", 2, 5.9, 3.5),
        ("ZBVZeroBubble", 2, 5.9, 3.5),
        ("DualPipeVDown", 2, 5.9, 3.5),
        ("DualPipeV", 2, 11.1, 6.8),
        ("VHalf", 2, 14.3, 9.4),
        ("VMin", 2, 18.6, 12.3),
    ],
)
def test_idle_share_of_the_makespan(name, per_rank, idle_4_8, idle_8_32):
    generator = get_schedule(name).generator
    for num_ranks, num_microbatches, percent in ((4, 8, idle_4_8), (8, 32, idle_8_32)):
        program = generator(num_ranks, num_ranks * per_rank, num_microbatches)

        for ready in (program, lower(program), lower(program, receives="late")):
            assert round(100 * simulate(ready).idle, 1) == percent


@sizes
def test_gpipe_and_one_f_one_b_wait_alike(grid):
    for p, m in grid:
        expected = (p - 1) / (m + p - 1)

        assert timeline_of(gpipe, p, m).idle == pytest.approx(expected)
        assert timeline_of(one_f_one_b, p, m).idle == pytest.approx(expected)


@sizes
def test_stages_per_rank_divide_the_waiting(grid):
    # Not only for multiples of p: rounds of microbatches are at least p long.
    for p, m in grid:
        for v in (1, 2, 3, 4):
            if m >= p:
                expected = pytest.approx((p - 1) / (m * v + p - 1))

                assert timeline_of(interleaved_one_f_one_b, p, m, v).idle == expected
                assert timeline_of(looped_bfs, p, m, v).idle == expected
                assert timeline_of(forward_only, p, m, v).idle == expected


@sizes
def test_weight_gradients_fill_two_thirds_of_the_holes(grid):
    for p, m in grid:
        if m >= p:
            assert timeline_of(zb_h1, p, m).idle == pytest.approx((p - 1) / (3 * m + p - 1))
            for v in (1, 2, 3, 4):
                timeline = timeline_of(interleaved_zero_bubble, p, m, v)
                assert timeline.idle == pytest.approx((p - 1) / (3 * m * v + p - 1))


@sizes
def test_no_rank_waits_once_it_has_started(grid):
    for p, m in grid:
        if m >= 2 * p - 1:
            for generator, v in ((zb_h2, 1), (zbv, 2), (dualpipe_v_down, 2)):
                timeline = timeline_of(generator, p, m, v)

                assert timeline.idle_in_span == pytest.approx(0)
                assert timeline.makespan == pytest.approx(3 * m + (p - 1) / v)


@sizes
def test_v_schedules_are_as_short_as_can_be_from_p_microbatches_on(grid):
    for p, m in grid:
        if m >= p:
            for generator in (zbv, dualpipe_v_down):
                assert timeline_of(generator, p, m, 2).makespan == pytest.approx(
                    3 * m + (p - 1) / 2
                )


@sizes
def test_less_memory_costs_less_than_one_f_one_b_waits(grid):
    for p, m in grid:
        if p > 1 and m >= 2 * p:
            half, least = timeline_of(v_half, p, m, 2), timeline_of(v_min, p, m, 2)

            lost_half = max(3 * p - 4, 3)
            lost_least = 4 * p - 5 + (0 if p % 3 else 2)
            assert half.idle == pytest.approx(lost_half / (6 * m + lost_half))
            assert least.idle == pytest.approx(lost_least / (6 * m + lost_least))
            assert half.idle <= least.idle < (p - 1) / (m + p - 1)


def test_uneven_times_cost_v_min_more_than_v_half():
    # The figures that the docstrings give, so that nobody picks V-Min for its speed.
    for generator, percent in ((v_half, 19.9), (v_min, 35.9)):
        program = generator(8, 16, 32)
        costs = StageCosts.uniform(program.placement, backward_input=1.4, backward_weight=0.6)

        assert round(100 * simulate(program, costs).idle, 1) == percent


@sizes
def test_wave_of_two_stages_waits_like_interleaved(grid):
    for p, m in grid:
        stage_forwards = 2 * timeline_of(wave, p, m, 2).makespan
        least = 6 * m + 3 * (p - 1)
        if m >= 3 * p:
            assert stage_forwards == pytest.approx(least)
        elif m >= 2 * p:
            assert stage_forwards <= least + 2


@sizes
def test_memory_stays_within_bounds(grid):
    for p, m in grid:
        assert peak(timeline_of(gpipe, p, m)) == m
        assert timeline_of(one_f_one_b, p, m).peak_memory == tuple(
            min(m, p - rank) for rank in range(p)
        )
        assert peak(timeline_of(zb_h1, p, m)) <= p
        assert peak(timeline_of(zb_h2, p, m)) <= 2 * p - 1
        assert peak(timeline_of(zbv, p, m, 2)) <= p
        assert peak(timeline_of(dualpipe_v_down, p, m, 2)) <= p + 0.5
        assert peak(timeline_of(dualpipe_v, p, m, 2)) <= p + 0.5
        assert peak(timeline_of(v_half, p, m, 2)) <= (p + 2) // 2
        assert peak(timeline_of(v_min, p, m, 2)) <= (p + 4) // 3


@sizes
def test_memory_of_interleaved_schedules_stays_within_bounds(grid):
    for p, m in grid:
        for v in (1, 2, 3, 4):
            longest_round = max(p, -(-m // max(1, m // p)))
            split = peak(timeline_of(interleaved_zero_bubble, p, m, v))
            whole = peak(timeline_of(interleaved_one_f_one_b, p, m, v))

            assert split <= ((v - 1) * longest_round + p) / v + 1e-9
            assert whole <= ((v - 1) * longest_round + (2 * p - 1 if v > 1 else p)) / v + 1e-9
            assert peak(timeline_of(looped_bfs, p, m, v)) == pytest.approx(m)
            if m % p == 0:
                assert split <= p + 1e-9
            if v > 1:
                assert peak(timeline_of(wave, p, m, v)) <= p + (p - 1) / v + 0.5 + 1e-9


@sizes
def test_pairing_both_ways_waits_twice_as_long(grid):
    for p, m in grid:
        if m >= 2 * p:
            timeline = timeline_of(dualpipe_v, p, m, 2)

            assert timeline.makespan == pytest.approx(3 * m + p - 1)


def test_pairing_both_ways_pays_when_pairs_save_time():
    # Why there are two: in turn, the second kind of pair only makes gradients wait.
    makespans = {}
    for generator in (dualpipe_v_down, dualpipe_v):
        program = generator(4, 8, 32)
        for saving in (0.0, 0.5):
            costs = StageCosts.uniform(program.placement, pair_saving=saving)
            makespans[generator, saving] = simulate(program, costs).makespan

    assert makespans[dualpipe_v_down, 0.0] < makespans[dualpipe_v, 0.0]
    assert makespans[dualpipe_v, 0.5] < makespans[dualpipe_v_down, 0.5]


@pytest.mark.parametrize("info", SCHEDULES.values(), ids=SCHEDULES)
def test_one_rank_never_waits(info):
    for num_microbatches in (1, 2, 5):
        timeline = simulate(info(1, info.stages_per_rank[0], num_microbatches))

        assert timeline.idle == pytest.approx(0)
