"""Improve a division into stages step by step, and prove that none is better.

`climb` shifts boundaries while that helps. `search` goes through all chains that could
beat the best one known, depth first, and leaves out those that a bound rules out: if it
ends by itself, the best is proven. `capacity_bound` is the bound for several stages per
rank: a rank cannot be fuller than the fullest sum of possible stages below a
threshold, and everything must fit below it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.planner.partition.chains import MET, SLACK, Chain, alone, suffix_bounds
from fxpipe.planner.partition.cuts import Cuts, Totals

__all__ = ["Loads", "capacity_bound", "climb", "possible_loads", "search"]


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
    fullest = max(
        range(len(totals.rank_loads)),
        key=lambda rank: (_excess_of(cuts, totals, rank), totals.rank_loads[rank]),
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


def _excess_of(cuts: Cuts, totals: Totals, rank: int) -> float:
    memory = cuts.limits.memory
    return max(totals.rank_memory[rank] - memory[rank], 0.0) if memory else 0.0


def _neighbour(cuts: Cuts, boundary: int, position: int, step: int) -> int | None:
    choices = cuts.allowed[boundary]
    at = bisect.bisect_left(choices, position) + step
    return choices[at] if 0 <= at < len(choices) else None


@dataclass(frozen=True, slots=True)
class Loads:
    """What one stage can come to, whatever the others are: sorted times, and least transfers."""

    times: tuple[float, ...]
    least_transfers: float


def possible_loads(cuts: Cuts) -> list[Loads]:
    """For each stage, what it can come to; stages that are alike share one object."""
    kinds: dict[object, Loads] = {}
    result = []
    for stage in range(cuts.num_stages):
        starts: Sequence[int] = cuts.allowed[stage]
        ends: Sequence[int] = cuts.allowed[stage + 1]
        is_inner = 0 < stage < cuts.num_stages - 1
        key: object = (tuple(starts), tuple(ends), cuts.neighbourhood(stage))
        if is_inner and not cuts.limits.pins:
            # Some of these leave too few items for the other stages; as a bound they do.
            starts = ends = range(1, len(cuts.masks) - 1)
            key = cuts.neighbourhood(stage)
        if key not in kinds:
            kinds[key] = _loads_between(cuts, stage, starts, ends)
        result.append(kinds[key])
    return result


def _loads_between(cuts: Cuts, stage: int, starts: Sequence[int], ends: Sequence[int]) -> Loads:
    times, least = set(), math.inf
    for start in starts:
        for end in ends:
            if cuts.is_before(start, end):
                load = cuts.load(stage, start, end)
                times.add(float(f"{load:.12e}"))
                least = min(least, load - cuts.before[end] + cuts.before[start])
    return Loads(tuple(sorted(times)), least)


def capacity_bound(cuts: Cuts, loads: Sequence[Loads]) -> float:
    """A time that the slowest rank cannot be below."""
    num_ranks = cuts.placement.num_ranks
    per_rank = [
        [loads[stage].times for stage in cuts.placement.stages_of(rank)]
        for rank in range(num_ranks)
    ]
    needed = cuts.total + math.fsum(load.least_transfers for load in loads)
    if math.isinf(needed):
        return math.inf

    def holds(limit: float) -> bool:
        fullest: dict[tuple[int, ...], float] = {}
        room = 0.0
        for lists in per_rank:
            key = tuple(map(id, lists))
            if key not in fullest:
                fullest[key] = _fullest(lists, limit)
            room += fullest[key]
        return room >= needed * (1 - 1e-12)

    low, high = needed / num_ranks, needed * 2
    if holds(low):
        return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low


_MOST_SUMS = 400


def _fullest(lists: Sequence[Sequence[float]], limit: float) -> float:
    """The greatest sum of one number from each list that does not exceed the limit."""
    limit *= SLACK
    sums: Sequence[float] = (0.0,)
    for numbers in lists[:-1]:
        if len(sums) * len(numbers) > _MOST_SUMS * _MOST_SUMS:
            return limit
        sums = sorted({a + b for a in sums for b in numbers if a + b <= limit})
    best = -math.inf
    last = lists[-1]
    for known in sums:
        at = bisect.bisect_right(last, limit - known)
        if at:
            best = max(best, known + last[at - 1])
    return best


def search(
    cuts: Cuts,
    best: tuple[Chain, Totals] | None,
    bound: float,
    loads: Sequence[Loads],
    *,
    effort: int,
) -> tuple[tuple[Chain, Totals] | None, bool]:
    """Look for a chain whose slowest rank is quicker than that of the best known one.

    Returns the best chain and whether it is proven; stops early when a chain reaches `bound`,
    and gives up after `effort` steps.
    """
    run = _Search(cuts, best, bound, loads, effort)
    if not run.is_done():
        run.go(0, (0,), [0.0] * cuts.placement.num_ranks)
    return run.best, run.steps_left > 0 or run.is_done()


class _Search:
    """The state of one depth-first search."""

    def __init__(
        self,
        cuts: Cuts,
        best: tuple[Chain, Totals] | None,
        bound: float,
        loads: Sequence[Loads],
        effort: int,
    ) -> None:
        self.cuts, self.best, self.bound, self.steps_left = cuts, best, bound, effort
        self.rest: list[dict[int, float]] = [{}] * (cuts.num_stages + 1)
        if not self.is_done():
            self.rest = suffix_bounds(cuts, alone(cuts), self.goal)
        self.transfers_after = [
            math.fsum(load.least_transfers for load in loads[stage + 1 :])
            for stage in range(cuts.num_stages)
        ]
        self.last_stage = {r: s for s, r in enumerate(cuts.ranks)}
        self.stage_of = [0] * len(cuts.work.items)
        self.states: list[list[float]] = [[] for _ in range(cuts.placement.num_ranks)]
        self.residuals: list[list[float]] = [[] for _ in range(cuts.placement.num_ranks)]

    @property
    def goal(self) -> float:
        """What the slowest rank must stay below to be an improvement."""
        return math.inf if self.best is None else self.best[1].slowest * (1 - 1e-9)

    def is_done(self) -> bool:
        return self.best is not None and self.best[1].slowest <= self.bound * MET

    def go(self, stage: int, chain: Chain, loads: list[float]) -> None:
        cuts = self.cuts
        if stage == cuts.num_stages:
            totals = cuts.totals(chain)
            if totals.slowest < self.goal and cuts.excess(totals) <= 0:
                self.best = (chain, totals)
            return
        start, rank = chain[-1], cuts.ranks[stage]
        ahead = [s for s in cuts.placement.stages_of(rank) if s >= stage]
        wish = (cuts.total / cuts.placement.num_ranks - loads[rank]) / len(ahead)
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
        if max(after) >= self.goal or not self._has_room(stage, end, after):
            return
        state, residual = cuts.memory(start, end) if cuts.limits.memory else (0.0, 0.0)
        self.states[rank].append(state)
        self.residuals[rank].append(residual)
        if self._fits(rank):
            for item in cuts.items(start, end):
                self.stage_of[item] = stage
            self.go(stage + 1, (*chain, end), after)
        self.states[rank].pop()
        self.residuals[rank].pop()

    def _has_room(self, stage: int, end: int, loads: list[float]) -> bool:
        """Whether what is left can be spread over the ranks that still take stages."""
        if math.isinf(self.goal):
            return True
        # What the stages so far send ahead is not in their loads yet, but in the least
        # transfers of nobody either: the sum below stays a lower bound.
        left = self.cuts.total - self.cuts.before[end] + self.transfers_after[stage]
        room = math.fsum(
            self.goal - loads[rank] for rank, last in self.last_stage.items() if last > stage
        )
        return left <= room * SLACK

    def _fits(self, rank: int) -> bool:
        memory = self.cuts.limits.memory
        if memory is None:
            return True
        held = self.cuts.rank_memory(rank, self.states[rank], self.residuals[rank])
        return held <= memory[rank]
