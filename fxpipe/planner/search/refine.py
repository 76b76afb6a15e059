"""Move the cuts of an option while its simulated step gets shorter.

A partition balances ranks; what counts is the step, which also depends on the order in which
uneven stages meet, and on the memory that only a simulation knows. Few enough divisions are all
looked at, from the most promising on; otherwise boundaries are shifted, alone and in runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fxpipe.planner.partition.work import Limits
from fxpipe.program import Placement

__all__ = ["best_cut"]

Cut = tuple[int, ...]
"""The first item of each stage."""

Rating = tuple[float, float]
"""What is missing in memory, then the time of a step."""

_ALL = 1_000


def best_cut(
    start: Sequence[int],
    times: Sequence[float],
    placement: Placement,
    limits: Limits,
    rate: Callable[[tuple[int, ...]], Rating],
    *,
    microbatches: int,
    tries: int,
) -> tuple[int, ...]:
    """The best stage of each item that is found, beginning with `start`.

    `rate` prices a division; at most `tries` are priced. A division whose slowest rank alone
    takes longer than the best step is not.
    """
    search = _Search(times, placement, limits, rate, microbatches, tries)
    first = tuple(start.index(stage) for stage in range(placement.num_stages))
    search.look(first)
    count = math.comb(len(times) - 1, placement.num_stages - 1)
    if count <= _ALL:
        found = [cut for cut in search.all_cuts() if search.is_allowed(cut)]
        for cut in sorted(found, key=search.bound):
            search.look(cut)
    else:
        search.climb()
    return search.stage_of(search.best)


@dataclass
class _Search:
    """What was looked at so far, and the best of it."""

    times: Sequence[float]
    placement: Placement
    limits: Limits
    rate: Callable[[tuple[int, ...]], Rating]
    microbatches: int
    tries: int

    def __post_init__(self) -> None:
        self.num_items = len(self.times)
        self.before = list(itertools.accumulate(self.times, initial=0.0))
        self.seen: set[Cut] = set()
        self.best: Cut = ()
        self.rating: Rating = (math.inf, math.inf)

    def look(self, cut: Cut) -> bool:
        """Price a division unless it cannot be the best; say whether it is."""
        if cut in self.seen or self.tries <= 0:
            return False
        if self.rating[0] <= 0 and self.bound(cut) >= self.rating[1]:
            return False
        self.seen.add(cut)
        self.tries -= 1
        found = self.rate(self.stage_of(cut))
        if found < self.rating:
            self.best, self.rating = cut, found
            return True
        return False

    def stage_of(self, cut: Cut) -> tuple[int, ...]:
        ends = (*cut[1:], self.num_items)
        return tuple(
            stage for stage, (a, b) in enumerate(zip(cut, ends, strict=True)) for _ in range(a, b)
        )

    def bound(self, cut: Cut) -> float:
        """A time that a step with this division cannot be below."""
        loads = [0.0] * self.placement.num_ranks
        for stage, (a, b) in enumerate(zip(cut, (*cut[1:], self.num_items), strict=True)):
            loads[self.placement.stage_to_rank[stage]] += self.before[b] - self.before[a]
        return max(loads) * self.microbatches

    def all_cuts(self) -> Iterator[Cut]:
        inner = itertools.combinations(range(1, self.num_items), self.placement.num_stages - 1)
        return ((0, *rest) for rest in inner)

    def is_allowed(self, cut: Cut) -> bool:
        stage_of = self.stage_of(cut)
        pins = all(stage_of[item] == stage for item, stage in self.limits.pins.items())
        return pins and all(
            len({stage_of[i] for i in group}) == 1 for group in self.limits.together
        )

    def climb(self) -> None:
        improved = True
        while improved and self.tries > 0:
            moves = [cut for cut in self._moves(self.best) if self.is_allowed(cut)]
            improved = any(self.look(cut) for cut in sorted(moves, key=self.bound))

    def _moves(self, cut: Cut) -> Iterator[Cut]:
        count = len(cut)
        for first in range(1, count):
            for last in range(first, count):
                for step in (-1, 1):
                    moved = tuple(
                        at + step if first <= stage <= last else at for stage, at in enumerate(cut)
                    )
                    pairs = itertools.pairwise((*moved, self.num_items))
                    if all(a < b for a, b in pairs):
                        yield moved
