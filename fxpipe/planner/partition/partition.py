"""Divide work among stages so that the slowest rank is as quick as possible.

In:  `Work` (items, flows, what they share), a placement of stages on ranks, `Limits`.
Out: a `Partition`: the stage of each item, and a bound that nobody can beat.

The load of a rank is the compute time of its stages plus every transfer that one of them
sends or receives. What "exact" means:

- One stage per rank, values with one reader (chains, skips): dynamic programming over the
  cuts of the model's own order, exact.
- Several stages per rank (interleaved, V), or values with several readers: a search with a
  bound; `is_exact` says whether the two met. Where they do not, `bound` says how far the
  result can be from the best.
- Models with branches: the above over all cuts that data flow allows, if there are at
  most `MOST_POSITIONS`; beyond that over the model's own order alone (`order`).

Equal results are told apart by evenness (the sum of squares of rank loads), then by the
earliest cuts, so the same input always gives the same stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxpipe.errors import PlanError
from fxpipe.planner.partition.cut_search import (
    MET,
    SLACK,
    Chain,
    capacity_bound,
    climb,
    most_even,
    search,
    suffix_bounds,
)
from fxpipe.planner.partition.cuts import Cuts, Totals, downsets, prefixes
from fxpipe.planner.partition.work import Limits, Work
from fxpipe.program import Placement
from fxpipe.text import bytes_text

__all__ = ["MOST_POSITIONS", "Partition", "partition"]

MOST_POSITIONS = 700
"""Up to so many cuts, branches may run in another order than the model's own."""


@dataclass(frozen=True)
class Partition:
    """Which stage each item is on, and what that costs.

    `bound` is a time that no division can get its slowest rank below. `order` is "model" if
    stages follow the order in which the model runs its items, else "branches".
    """

    stage_of: tuple[int, ...]
    placement: Placement
    totals: Totals
    bound: float
    order: str

    @property
    def slowest(self) -> float:
        """The load of the slowest rank."""
        return self.totals.slowest

    @property
    def imbalance(self) -> float:
        """The slowest rank's load over the mean; 1 is perfect."""
        loads = self.totals.rank_loads
        mean = math.fsum(loads) / len(loads)
        return self.slowest / mean if mean else 1.0

    @property
    def is_exact(self) -> bool:
        """Whether no other division has a quicker slowest rank."""
        return self.slowest <= self.bound * MET


def partition(
    work: Work,
    stages: int | Placement,
    limits: Limits | None = None,
    *,
    effort: int = 20_000,
    reorder_gain: float = 0.0,
) -> Partition:
    """Divide the work; `stages` is their number (one per rank) or a placement.

        >>> partition(Work.chain([1, 1, 1, 3]), 2).stage_of
        (0, 0, 0, 1)

    `effort` bounds the steps of the search where dynamic programming is not exact. Branches
    run in another order than the model's own only if the slowest rank gains at least the
    share `reorder_gain` by it.

    Raises:
        PlanError: there are fewer places to cut than needed, pins and groups contradict
            the order of the data, or memory is short; the message says where and by how much.
    """
    placement = Placement.loop(stages, stages) if isinstance(stages, int) else stages
    limits = limits or Limits()
    limits.check(work, placement)
    if len(work.items) < placement.num_stages:
        raise PlanError(
            f"{placement.num_stages} stages need as many items, but there are {len(work.items)}"
        )
    cuts = Cuts(work, placement, limits, prefixes(work))
    best, bound = _solve(cuts, effort)
    chosen, order = cuts, "model"
    if best is None or best[1].slowest > _floor(work, placement) * (1 + 1e-9):
        masks = downsets(work, MOST_POSITIONS)
        if masks is not None and len(masks) > len(work.items) + 1:
            wider = Cuts(work, placement, limits, masks)
            other, bound = _solve(wider, effort)
            if other is not None and (
                best is None or other[1].key[0] < best[1].key[0] * (1 - reorder_gain)
            ):
                best, chosen, order = other, wider, "branches"
    if best is None:
        raise PlanError(_explain(work, placement, limits))
    return Partition(chosen.assignment(best[0]), placement, best[1], bound, order)


def _floor(work: Work, placement: Placement) -> float:
    """A time that is out of reach whatever the order: the mean, and the longest item."""
    times = [item.time for item in work.items]
    return max(math.fsum(times) / placement.num_ranks, *times)


def _solve(cuts: Cuts, effort: int) -> tuple[tuple[Chain, Totals] | None, float]:
    """The best chain of positions and a bound on what any chain can reach."""
    rest = suffix_bounds(cuts)
    bound = rest[0].get(0, math.inf)
    even = most_even(cuts, rest, bound * SLACK)
    if even is None:
        return None, math.inf
    known = (even, cuts.totals(even))
    if cuts.placement.num_ranks < cuts.num_stages:
        known = climb(cuts, even)
        bound = max(bound, capacity_bound(cuts, known[1].slowest))
    best = known if cuts.excess(known[1]) <= 0 else None
    if best is None or best[1].slowest > bound * MET:
        found, _ = search(cuts, None, bound, rest, goal=bound * MET, effort=effort // 2)
        goal = math.inf if best is None else best[1].slowest * (1 - 1e-9)
        is_proven = found is not None
        if found is None:
            found, is_proven = search(cuts, best, bound, rest, goal=goal, effort=effort)
        best = found and _climbed(cuts, found)
        if best is not None and is_proven:
            bound = best[1].slowest
    return best, bound


def _climbed(cuts: Cuts, best: tuple[Chain, Totals]) -> tuple[Chain, Totals]:
    return min(best, climb(cuts, best[0]), key=lambda found: found[1].key)


def _explain(work: Work, placement: Placement, limits: Limits) -> str:
    """Why there is no partition: memory, or pins and groups."""
    cuts = Cuts(work, placement, replace(limits, memory=None), prefixes(work))
    rest = suffix_bounds(cuts)
    if 0 not in rest[0]:
        return _explain_pins(work, placement, limits)
    assert limits.memory is not None
    even = most_even(cuts, rest, rest[0][0] * SLACK)
    assert even is not None
    tight = Cuts(work, placement, limits, prefixes(work))
    chain, totals = climb(tight, even)
    lines = []
    for rank, (needed, has) in enumerate(zip(totals.rank_memory, limits.memory, strict=True)):
        if needed > has:
            stages = placement.stages_of(rank)
            items = [i for s in stages for i in tight.items(chain[s], chain[s + 1])]
            lines.append(
                f"  rank {rank} (stage {', '.join(map(str, stages))}: {_names(work, items)}) "
                f"needs {bytes_text(needed)}, has {bytes_text(has)}, "
                f"missing {bytes_text(needed - has)}"
            )
    return (
        f"{len(work.items)} items do not fit on {placement.num_ranks} ranks; "
        "cut so that as little as possible is missing:\n" + "\n".join(lines)
    )


def _explain_pins(work: Work, placement: Placement, limits: Limits) -> str:
    wishes = [f"{work.name(item)} in stage {stage}" for item, stage in sorted(limits.pins.items())]
    wishes += [
        " and ".join(work.name(item) for item in group) + " together" for group in limits.together
    ]
    groups = [g for g in limits.together if len(g) > 1]
    places = len(Cuts(work, placement, limits, prefixes(work)).masks) - 2
    hint = f"; these groups leave {places} places to cut" if groups else ""
    return (
        f"no division into {placement.num_stages} stages follows the flow of data with "
        f"{', '.join(wishes) or 'what is given'}{hint}"
    )


def _names(work: Work, items: list[int]) -> str:
    if len(items) == 1:
        return work.name(items[0])
    return f"{work.name(items[0])} .. {work.name(items[-1])}"
