"""Find the best chain of positions by dynamic programming.

A chain of positions is a division into stages. `shortest` handles one stage per rank: it
finds the least possible slowest stage, and then, among those, the most even division.
`folded` handles the V, where each rank has one stage on the way down and one on the way up.

Both price a value that several later stages read as if one did. So they are exact where
values have one reader, and lower bounds elsewhere.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

from fxpipe.planner.partition.cuts import Cuts

__all__ = ["MET", "SLACK", "Chain", "Price", "alone", "folded", "shortest", "suffix_bounds"]

Chain = tuple[int, ...]
"""Positions from the empty one to the whole: one more than there are stages."""

Price = Callable[[int, int, int], float]
"""`(stage, start, end) -> cost`; infinite where the stage is not allowed."""

SLACK = 1 + 1e-9
"""Times closer than this are equal."""

MET = 1 + 1e-7
"""A result closer than this to its bound has met it."""


def alone(cuts: Cuts) -> Price:
    """The price of a stage by itself; infinite if it does not fit on its rank."""
    if cuts.limits.memory is None:
        return cuts.load

    def price(stage: int, start: int, end: int) -> float:
        return cuts.load(stage, start, end) if cuts.fits(stage, start, end) else math.inf

    return price


def shortest(
    cuts: Cuts, price: Price, *, upper: float = math.inf, at_least: Sequence[float] | None = None
) -> Chain | None:
    """The chain with the least greatest price, and then the least sum of squares.

    `upper` is a price that is known to be reachable. `at_least[end] - at_least[start]` is
    below every price, by default the compute time. None if no chain is allowed.
    """
    least_of = cuts.before if at_least is None else at_least
    least = _least_worst(cuts, price, upper, least_of)
    if math.isinf(least):
        return None
    limit = least * SLACK
    best: dict[int, tuple[float, Chain]] = {0: (0.0, (0,))}
    for stage in range(cuts.num_stages):
        after: dict[int, tuple[float, Chain]] = {}
        left = cuts.num_stages - stage - 1
        starts = list(best)
        for end in cuts.allowed[stage + 1]:
            if least_of[-1] - least_of[end] > left * limit:
                continue
            for start in _starts(cuts, starts, end, least_of, limit):
                cost = price(stage, start, end)
                if cost <= limit:
                    option = (best[start][0] + cost * cost, (*best[start][1], end))
                    after[end] = min(after.get(end, option), option)
        best = after
    return min(best.values())[1]


def _least_worst(cuts: Cuts, price: Price, upper: float, least_of: Sequence[float]) -> float:
    """The least greatest price over all chains, by dynamic programming."""
    best = {0: 0.0}
    for stage in range(cuts.num_stages):
        after: dict[int, float] = {}
        left = cuts.num_stages - stage - 1
        starts = list(best)
        for end in cuts.allowed[stage + 1]:
            if least_of[-1] - least_of[end] > left * upper * SLACK:
                continue
            least = math.inf
            for start in _starts(cuts, starts, end, least_of, upper * SLACK):
                if least_of[end] - least_of[start] >= least and cuts.in_order:
                    break
                if best[start] < least:
                    least = min(least, max(best[start], price(stage, start, end)))
            if least <= upper * SLACK and least < math.inf:
                after[end] = least
        best = after
    return min(best.values(), default=math.inf)


def _starts(
    cuts: Cuts, starts: Sequence[int], end: int, least_of: Sequence[float], limit: float
) -> Iterator[int]:
    """Positions at which a stage that ends at `end` may start, nearest first."""
    for at in range(bisect.bisect_left(starts, end) - 1, -1, -1):
        start = starts[at]
        if least_of[end] - least_of[start] > limit:
            if cuts.in_order:
                return  # earlier starts only make the stage longer
        elif cuts.is_before(start, end):
            yield start


def suffix_bounds(cuts: Cuts, price: Price, upper: float) -> list[dict[int, float]]:
    """`bounds[stage][start]`: the least greatest price of all stages from `stage` on.

    Positions from which nothing below `upper` can follow are left out.
    """
    bounds: list[dict[int, float]] = [{} for _ in range(cuts.num_stages + 1)]
    bounds[-1] = {len(cuts.masks) - 1: 0.0}
    for stage in reversed(range(cuts.num_stages)):
        for start in cuts.allowed[stage]:
            least = math.inf
            for end, known in bounds[stage + 1].items():
                if cuts.before[end] - cuts.before[start] >= min(least, upper):
                    if cuts.in_order:
                        break
                    continue
                if known < least and cuts.is_before(start, end):
                    least = min(least, max(known, price(stage, start, end)))
            if least < upper:
                bounds[stage][start] = least
    return bounds


def folded(cuts: Cuts, upper: float) -> tuple[float, Chain] | None:
    """The best chain when rank r holds stages r and 2R-1-r, each stage priced by itself.

    A rank then takes what is outermost on both sides of the ranks after it, so what is left
    is one interval, and dynamic programming over intervals is exact. None if nothing
    is at most `upper`.
    """
    num_ranks, end = cuts.placement.num_ranks, len(cuts.masks) - 1
    best: dict[tuple[int, int], tuple[float, Chain, Chain]] = {(0, end): (0.0, (0,), (end,))}
    upper *= SLACK
    for rank in range(num_ranks):
        after: dict[tuple[int, int], tuple[float, Chain, Chain]] = {}
        left = num_ranks - rank - 1
        for (low, high), (known, front, back) in best.items():
            for inner_low, inner_high, cost in _both_sides(cuts, rank, low, high, upper, left):
                option = (max(known, cost), (*front, inner_low), (inner_high, *back))
                if option < after.get((inner_low, inner_high), (math.inf,)):
                    after[inner_low, inner_high] = option
        best = after
    found = min(best.values(), default=None)
    return None if found is None else (found[0], (*found[1], *found[2][1:]))


def _both_sides(
    cuts: Cuts, rank: int, low: int, high: int, upper: float, left: int
) -> Iterator[tuple[int, int, float]]:
    """What a rank can take from both ends of an interval: new ends and the load."""
    up = cuts.num_stages - 1 - rank
    before, price = cuts.before, cuts.load
    for inner_low in cuts.allowed[rank + 1]:
        if inner_low <= low:
            continue
        first = price(rank, low, inner_low)
        if before[inner_low] - before[low] > upper:
            break
        for inner_high in reversed(cuts.allowed[up]):
            if inner_high >= high or inner_high < inner_low:
                continue
            if left == 0 and inner_high != inner_low:
                continue
            if before[inner_low] - before[low] + before[high] - before[inner_high] > upper:
                break
            if before[inner_high] - before[inner_low] > left * upper:
                continue
            cost = first + price(up, inner_high, high)
            if cost <= upper and cuts.fit_together(rank, ((low, inner_low), (inner_high, high))):
                yield inner_low, inner_high, cost
