"""The comparison is right about what it says, and says it in one table."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Edges, Link, StageCosts, compare, simulate
from fxpipe.program.generators import SCHEDULES, get_schedule


def test_the_table_lists_the_quickest_schedule_that_fits_first():
    names = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]

    comparison = compare(4, 8, schedules=names, stages_per_rank=[1, 2], memory_limit=5)

    assert str(comparison) == dedent("""\
        schedule         stages  makespan   idle  once started  memory  messages
        ZBVZeroBubble         2      25.5   5.9%          0.0%       4        96
        1F1B                  1        33  27.3%         27.3%       4        48
        Interleaved1F1B       1        33  27.3%         27.3%       4        48
        Interleaved1F1B       2      28.5  15.8%         15.8%     5.5       112  over 5
        GPipe                 1        33  27.3%         27.3%       8        48  over 5""")
    assert comparison.best.schedule == "ZBVZeroBubble"


def test_every_schedule_that_trains_is_compared_wherever_it_is_defined():
    comparison = compare(2, 4, stages_per_rank=[1, 2])

    found = {(row.schedule, row.stages_per_rank) for row in comparison.rows}
    for name, info in SCHEDULES.items():
        for per_rank in (1, 2):
            expected = info.allows(per_rank) and name != "ForwardOnly"
            assert ((name, per_rank) in found) == expected


def test_figures_are_those_of_the_simulation():
    costs = {}

    def remember(placement):
        costs["given"] = StageCosts.uniform(placement, forward=1, backward_input=1.4)
        return costs["given"]

    (row,) = compare(3, 6, schedules=["GPipe"], stages_per_rank=[1], costs=remember).rows

    timeline = simulate(get_schedule("GPipe")(3, 3, 6), costs["given"])
    assert row.makespan == pytest.approx(timeline.makespan)
    assert row.idle == pytest.approx(timeline.idle)
    assert row.peak_memory == pytest.approx(max(timeline.peak_memory))


def test_slow_links_make_many_stages_less_attractive():
    def slow(placement):
        return StageCosts.uniform(placement, link=Link(0.5))

    fast = compare(4, 8, schedules=["Interleaved1F1B"], stages_per_rank=[1, 4])
    slowed = compare(4, 8, schedules=["Interleaved1F1B"], stages_per_rank=[1, 4], costs=slow)

    assert fast.best.stages_per_rank == 4
    assert slowed.best.stages_per_rank == 1


def test_skip_edges_count_as_messages():
    def skips(num_stages):
        return Edges.of(num_stages, [*((s, s + 1) for s in range(num_stages - 1)), (0, 2)])

    plain = compare(3, 4, schedules=["1F1B"], stages_per_rank=[1])
    skipping = compare(3, 4, schedules=["1F1B"], stages_per_rank=[1], edges=skips)

    assert plain.rows[0].num_messages == 4 * 4
    assert skipping.rows[0].num_messages == 6 * 4


def test_if_nothing_fits_the_least_hungry_is_named():
    comparison = compare(4, 8, schedules=["GPipe", "1F1B"], stages_per_rank=[1], memory_limit=3)

    with pytest.raises(ScheduleError, match=r"fits into 3; 1F1B with 1 stages per rank .* 4"):
        _ = comparison.best


def test_an_unknown_schedule_or_none_at_all_is_refused():
    with pytest.raises(ScheduleError, match="there is no schedule 'ZB9'"):
        compare(4, 8, schedules=["ZB9"])
    with pytest.raises(ScheduleError, match="no schedule is defined for this:\n  1F1B with 2 st"):
        compare(4, 8, schedules=["1F1B"], stages_per_rank=[2])
