"""Find the chain of positions with the quickest slowest rank, and prove that none is better.

`suffix_bounds` is dynamic programming from the end: the least greatest price of the stages
from each position on. With one stage per rank, where values have one reader, `most_even` has the
answer; otherwise that is a bound. `capacity_bound` is the bound for several stages per rank: a
rank cannot be fuller than the fullest sum of possible stages below a threshold, and everything
must fit below it. `search` goes through all chains that the bounds leave, depth
first: if it ends by itself, the best is proven. `climb` shifts boundaries while that helps.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.planner.partition.cuts import Cuts, Totals

__all__ = [
    "MET",
    "SLACK",
    "Chain",
    "capacity_bound",
    "climb",
    "most_even",
    "search",
    "suffix_bounds",
]

Chain = tuple[int, ...]
"""Positions from the empty one to the whole: one more than there are stages."""

SLACK = 1 + 1e-9
"""Times closer than this are equal."""

MET = 1 + 1e-7
"""A result closer than this to its bound has met it."""


def suffix_bounds(cuts: Cuts) -> list[dict[int, float]]:
    """`bounds[stage][start]`: the least greatest price of all stages from `stage` on.

    A price is a stage's least load, infinite if it does not fit on its rank. Positions from
    which nothing can follow are left out.
    """
    bounds: list[dict[int, float]] = [{} for _ in range(cuts.num_stages + 1)]
    bounds[-1] = {len(cuts.masks) - 1: 0.0}
    for stage in reversed(range(cuts.num_stages)):
        ends = sorted(bounds[stage + 1])
        rest = [bounds[stage + 1][end] for end in ends]
        falling = list(itertools.accumulate(rest, min))
        for start in cuts.allowed[stage]:
            first = bisect.bisect_right(ends, start)
            if cuts.in_order:
                least = _best_end_in_order(cuts, stage, start, first, ends, rest, falling)
            else:
                least = _best_end(cuts, stage, start, ends[first:], rest[first:])
            if least < math.inf:
                bounds[stage][start] = least
    return bounds


def _best_end(
    cuts: Cuts, stage: int, start: int, ends: Sequence[int], rest: Sequence[float]
) -> float:
    """The least greatest price of a stage and what follows it; `rest` is that of what follows."""
    least = math.inf
    for end, after in zip(ends, rest, strict=True):
        if max(after, cuts.before[end] - cuts.before[start]) >= least:
            continue
        if cuts.is_before(start, end) and cuts.fits(stage, start, end):
            least = min(least, max(after, cuts.load(stage, start, end)))
    return least


def _best_end_in_order(
    cuts: Cuts,
    stage: int,
    start: int,
    first: int,
    ends: Sequence[int],
    rest: Sequence[float],
    falling: Sequence[float],
) -> float:
    """The same for `ends[first:]`, where a later end makes the stage longer.

    What follows gets shorter, `falling[i]` being the least of `rest` up to `i`. The best end is
    near the one where the two meet: look both ways from there, until one alone is no better.
    """
    began, places = cuts.before[start], range(len(ends))
    meet = bisect.bisect_left(
        places, True, first, key=lambda i: cuts.before[ends[i]] - began >= falling[i]
    )
    if meet > first and not cuts.fits(stage, start, ends[meet - 1]):
        meet = bisect.bisect_left(
            places, True, first, meet, key=lambda i: not cuts.fits(stage, start, ends[i])
        )
    least = math.inf
    for i in range(meet, len(ends)):
        if cuts.before[ends[i]] - began >= least or not cuts.fits(stage, start, ends[i]):
            break
        if rest[i] < least:
            least = min(least, max(rest[i], cuts.load(stage, start, ends[i])))
    for i in range(meet - 1, first - 1, -1):
        if falling[i] >= least:
            break
        if rest[i] < least:
            least = min(least, max(rest[i], cuts.load(stage, start, ends[i])))
    return least


def most_even(cuts: Cuts, rest: Sequence[dict[int, float]], limit: float) -> Chain | None:
    """Of the chains whose prices stay within the limit, one with the least sum of squares."""
    best: dict[int, tuple[float, Chain]] = {0: (0.0, (0,))}
    for stage in range(cuts.num_stages):
        after: dict[int, tuple[float, Chain]] = {}
        for end in sorted(end for end, least in rest[stage + 1].items() if least <= limit):
            for start, (known, chain) in best.items():
                if cuts.before[end] - cuts.before[start] > limit:
                    continue
                if cuts.is_before(start, end) and cuts.fits(stage, start, end):
                    price = cuts.load(stage, start, end)
                    if price <= limit:
                        option = (known + price * price, (*chain, end))
                        after[end] = min(after.get(end, option), option)
        best = after
    return min(best.values())[1] if best else None


def capacity_bound(cuts: Cuts, reached: float) -> float:
    """A time that the slowest rank cannot be below; `reached` is one that a chain has."""
    longest = reached * SLACK
    alike: dict[object, tuple[Sequence[float], float]] = {}
    loads = [_possible_loads(cuts, stage, longest, alike) for stage in range(cuts.num_stages)]
    needed = cuts.total + math.fsum(least for _, least in loads)
    num_ranks = cuts.placement.num_ranks
    lists = [[loads[s][0] for s in cuts.placement.stages_of(rank)] for rank in range(num_ranks)]

    def holds(limit: float) -> bool:
        kinds: dict[object, float] = {}
        keys = [tuple(map(id, own)) for own in lists]
        for key, own in zip(keys, lists, strict=True):
            if key not in kinds:
                kinds[key] = _fullest(own, limit * SLACK)
        return math.fsum(kinds[key] for key in keys) >= needed * (1 - 1e-12)

    low, high = needed / num_ranks, longest
    if holds(low):
        return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low


def _possible_loads(
    cuts: Cuts, stage: int, longest: float, alike: dict[object, tuple[Sequence[float], float]]
) -> tuple[Sequence[float], float]:
    """What a stage can come to, up to `longest`, sorted, and its least transfers.

    Stages that are alike share one object.
    """
    starts: Sequence[int] = cuts.allowed[stage]
    ends: Sequence[int] = cuts.allowed[stage + 1]
    if 0 < stage < cuts.num_stages - 1 and not cuts.limits.pins:
        # Some of these leave too few items for the other stages; as a bound they do.
        starts = ends = range(1, len(cuts.masks) - 1)
    key = (tuple(starts), tuple(ends), cuts.neighbourhood(stage))
    if key not in alike:
        times, least = set(), math.inf
        for start in starts:
            for end in ends[bisect.bisect_right(ends, start) :]:
                time = cuts.before[end] - cuts.before[start]
                if time > longest and cuts.in_order:
                    break
                if time <= longest and cuts.is_before(start, end):
                    load = cuts.load(stage, start, end)
                    if load <= longest:
                        times.add(float(f"{load:.12e}"))
                        least = min(least, load - time)
        alike[key] = (tuple(sorted(times)), least)
    return alike[key]


_MOST_SUMS = 160_000


def _fullest(lists: Sequence[Sequence[float]], limit: float) -> float:
    """The greatest sum of one number from each list that does not exceed the limit."""
    sums: Sequence[float] = (0.0,)
    for numbers in lists[:-1]:
        if len(sums) * len(numbers) > _MOST_SUMS:
            return limit
        sums = sorted({a + b for a in sums for b in numbers if a + b <= limit})
    best, last = -math.inf, lists[-1]
    for known in sums:
        at = bisect.bisect_right(last, limit - known)
        if at:
            best = max(best, known + last[at - 1])
    return best


def climb(cuts: Cuts, chain: Chain) -> tuple[Chain, Totals]:
    """Shift boundaries while the result gets better.

    Besides single boundaries, whole runs of neighbouring ones move by one position: that
    takes work from one rank and gives it to one further away.
    """
    totals = cuts.totals(chain)

    def rating(found: Totals) -> tuple[float, float, float]:
        return (max(cuts.excess(found), 0.0), *found.key)

    improved = True
    while improved:
        improved = False
        for tried in _shifts(cuts, chain, totals):
            found = cuts.totals(tried)
            if rating(found) < rating(totals):
                chain, totals, improved = tried, found, True
                break
    return chain, totals


def _shifts(cuts: Cuts, chain: Chain, totals: Totals) -> Iterator[Chain]:
    """Chains in which a run of boundaries next to a stage of the worst rank is shifted."""
    memory = cuts.limits.memory or (math.inf,) * len(totals.rank_loads)
    fullest = max(
        range(len(totals.rank_loads)),
        key=lambda r: (max(totals.rank_memory[r] - memory[r], 0.0), totals.rank_loads[r]),
    )
    last = cuts.num_stages - 1
    runs = [(b, b) for b in range(1, cuts.num_stages)]
    for stage in cuts.placement.stages_of(fullest):
        runs += [(first, stage) for first in range(1, stage)]
        runs += [(stage + 1, end) for end in range(stage + 2, last + 1)]
    for first, end in runs:
        for step in (-1, 1):
            moved = [_neighbour(cuts, b, chain[b], step) for b in range(first, end + 1)]
            if None in moved:
                continue
            tried = (*chain[:first], *(m for m in moved if m is not None), *chain[end + 1 :])
            if all(
                cuts.is_before(*pair) for pair in itertools.pairwise(tried[first - 1 : end + 2])
            ):
                yield tried


def _neighbour(cuts: Cuts, boundary: int, position: int, step: int) -> int | None:
    choices = cuts.allowed[boundary]
    at = bisect.bisect_left(choices, position) + step
    return choices[at] if 0 <= at < len(choices) else None


def search(
    cuts: Cuts,
    best: tuple[Chain, Totals] | None,
    bound: float,
    rest: Sequence[dict[int, float]],
    *,
    goal: float,
    effort: int,
) -> tuple[tuple[Chain, Totals] | None, bool]:
    """Look for chains whose slowest rank is quicker than the goal, then than the best found.

    `rest` are the suffix bounds. Returns the best chain and whether it is proven; stops
    early when a chain reaches `bound`, and gives up after `effort` steps.
    """
    run = _Search(cuts, best, bound, rest, goal, effort)
    if not run.is_done():
        run.go(0, (0,), [0.0] * cuts.placement.num_ranks)
    return run.best, run.steps_left > 0 or run.is_done()


@dataclass
class _Search:
    """The state of one depth-first search."""

    cuts: Cuts
    best: tuple[Chain, Totals] | None
    bound: float
    rest: Sequence[dict[int, float]]
    goal: float
    steps_left: int

    def __post_init__(self) -> None:
        self.last_stage = {r: s for s, r in enumerate(self.cuts.ranks)}
        self.stage_of = [0] * len(self.cuts.work.items)
        self.held: list[list[tuple[float, float]]] = [[] for _ in self.last_stage]

    def is_done(self) -> bool:
        return self.best is not None and self.best[1].slowest <= self.bound * MET

    def go(self, stage: int, chain: Chain, loads: list[float]) -> None:
        cuts = self.cuts
        if stage == cuts.num_stages:
            totals = cuts.totals(chain)
            if totals.slowest < self.goal and cuts.excess(totals) <= 0:
                self.best, self.goal = (chain, totals), totals.slowest * (1 - 1e-9)
            return
        start, rank = chain[-1], cuts.ranks[stage]
        open_loads = [loads[r] for r, last in self.last_stage.items() if last >= stage]
        mean = (cuts.total - cuts.before[start] + math.fsum(open_loads)) / len(open_loads)
        ahead = sum(s >= stage for s in cuts.placement.stages_of(rank))
        wish = (mean - loads[rank]) / ahead
        ends = [
            (abs(load - wish), end)
            for end in self.rest[stage + 1]
            if cuts.is_before(start, end)
            and (load := cuts.before[end] - cuts.before[start]) + loads[rank] < self.goal
        ]
        for _, end in sorted(ends):
            if self.steps_left <= 0 or self.is_done():
                return
            self.steps_left -= 1
            self._try(stage, chain, end, loads)

    def _try(self, stage: int, chain: Chain, end: int, loads: list[float]) -> None:
        cuts, start, rank = self.cuts, chain[-1], self.cuts.ranks[stage]
        if self.rest[stage + 1][end] >= self.goal:
            return
        after = list(loads)
        after[rank] += cuts.before[end] - cuts.before[start]
        for source, time in cuts.arrivals(stage, start, end, self.stage_of):
            after[rank] += time
            after[cuts.ranks[source]] += time
        # What is left must find room on the ranks that still take stages.
        left = cuts.total - cuts.before[end]
        room = math.fsum(
            self.goal - after[r] for r, last in self.last_stage.items() if last > stage
        )
        if max(after) >= self.goal or left > room * SLACK:
            return
        self.held[rank].append(cuts.memory(start, end))
        if cuts.is_within(rank, self.held[rank]):
            for item in cuts.items(start, end):
                self.stage_of[item] = stage
            self.go(stage + 1, (*chain, end), after)
        self.held[rank].pop()
