"""The bounds of the search against their definition."""

import functools
import math
import random

import pytest

from fxpipe.planner.partition.cut_search import suffix_bounds
from fxpipe.planner.partition.cuts import Cuts, downsets, prefixes
from fxpipe.planner.partition.work import Flow, Item, Limits, Shared, Work
from fxpipe.program import Link, Placement


@pytest.mark.parametrize("positions", ["in order", "branches"])
@pytest.mark.parametrize("seed", range(40))
def test_suffix_bounds_are_the_least_greatest_price_of_any_end(seed, positions):
    cuts = random_cuts(random.Random(seed), positions)

    @functools.cache
    def least(stage, start):
        if stage == cuts.num_stages:
            return 0.0 if start == len(cuts.masks) - 1 else math.inf
        return min(
            (
                max(cuts.load(stage, start, end), least(stage + 1, end))
                for end in cuts.allowed[stage + 1]
                if cuts.is_before(start, end) and cuts.fits(stage, start, end)
            ),
            default=math.inf,
        )

    wanted = [
        {start: least(stage, start) for start in cuts.allowed[stage]}
        for stage in range(cuts.num_stages)
    ]
    assert suffix_bounds(cuts)[:-1] == [
        {start: price for start, price in row.items() if price < math.inf} for row in wanted
    ]


def random_cuts(draw, positions):
    """Work with skips and shared memory on ranks that may be too small for some stages."""
    count = draw.randint(6, 30 if positions == "in order" else 8)
    items = tuple(
        Item(str(i), draw.choice([0.0, 1.0, 2.5]), 9 * draw.random(), draw.random())
        for i in range(count)
    )
    pairs = [(i, i + 1) for i in range(count - 1) if positions == "in order" or i % 3]
    pairs += [tuple(sorted(draw.sample(range(count), 2))) for _ in range(3)]
    flows = tuple(Flow(a, (b,), 5 * draw.random(), draw.random()) for a, b in pairs)
    shared = tuple(Shared(tuple(draw.sample(range(count), 2)), 4.0, 1.0) for _ in range(2))
    work, num_stages = Work(items, flows, shared), draw.choice([2, 4])
    placement = draw.choice([Placement.loop, Placement.v])(draw.choice([2, num_stages]), num_stages)
    room = sum(item.state + 3 * item.residual for item in items) / num_stages
    limits = Limits(
        memory=tuple(room * draw.uniform(0.8, 2.0) for _ in range(placement.num_ranks)),
        in_flight=tuple(
            tuple(tuple(draw.randint(1, 4) for _ in placement.stages_of(rank)) for _ in range(2))
            for rank in range(placement.num_ranks)
        ),
        link=Link(0.1, 2.0),
    )
    masks = prefixes(work) if positions == "in order" else downsets(work, 700)
    return Cuts(work, placement, limits, masks or prefixes(work))
