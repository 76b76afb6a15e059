"""Where a stage may end, and what the work between two such places costs.

A *position* is a set of items that is closed under "what feeds it": all that has
run before a cut. In the order of the model these are its prefixes; a model with
branches has more. A stage is the difference of two positions, so choosing stages
is choosing a chain of positions, and pins and groups only strike positions out.

Positions are bit masks over items and are named by their index in `Cuts.masks`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.planner.partition.work import Limits, Work
from fxpipe.program import Placement

__all__ = ["Cuts", "Totals", "downsets", "prefixes"]


def prefixes(work: Work) -> list[int]:
    """The positions of the order in which the model runs its items."""
    return [(1 << i) - 1 for i in range(len(work.items) + 1)]


def downsets(work: Work, limit: int) -> list[int] | None:
    """All positions, smallest first; None if there are more than `limit`."""
    count = len(work.items)
    if count >= limit:
        return None
    feeds = [0] * count
    for flow in work.flows:
        for target in flow.targets:
            feeds[target] |= 1 << flow.source
    seen = {0}
    layer = [0]
    while layer:
        grown = set()
        for mask in layer:
            for item in range(count):
                bit = 1 << item
                if not mask & bit and not feeds[item] & ~mask:
                    grown.add(mask | bit)
        seen |= grown
        if len(seen) > limit:
            return None
        layer = sorted(grown)
    return sorted(seen, key=lambda mask: (mask.bit_count(), mask))


@dataclass(frozen=True, slots=True)
class Totals:
    """What a chain of positions costs in truth: times and bytes per stage and rank."""

    stage_times: tuple[float, ...]
    stage_transfers: tuple[float, ...]
    rank_loads: tuple[float, ...]
    rank_memory: tuple[float, ...]

    @property
    def slowest(self) -> float:
        return max(self.rank_loads)

    @property
    def key(self) -> tuple[float, float]:
        """What is minimised: the slowest rank, then unevenness; rounded, so that ties are ties."""
        return (_round(self.slowest), _round(sum(load * load for load in self.rank_loads)))


def _round(value: float) -> float:
    return float(f"{value:.10e}")


class Cuts:
    """Positions of some work, and the price of stages between them."""

    def __init__(
        self, work: Work, placement: Placement, limits: Limits, masks: Iterable[int]
    ) -> None:
        self.work, self.placement, self.limits = work, placement, limits
        groups = [_mask(group) for group in limits.together]
        self.masks = [m for m in masks if not any(m & g and g & ~m for g in groups)]
        self.num_stages = placement.num_stages
        self.ranks = placement.stage_to_rank
        self.in_order = all(a & ~b == 0 for a, b in itertools.pairwise(self.masks))
        self.before = self._sums([item.time for item in work.items])
        self.total = self.before[-1]
        self._state_before = self._sums([item.state for item in work.items])
        self._residual_before = self._sums([item.residual for item in work.items])
        self._memory: dict[tuple[int, int], tuple[float, float]] = {}
        self._sources = [1 << flow.source for flow in work.flows]
        self._targets = [_mask(flow.targets) for flow in work.flows]
        self._crossing = self._all_crossing()
        self._shared = [(_mask(s.items), s) for s in work.shared]
        self._prices: dict[tuple[int, int, int], float] = {}
        self._least: dict[tuple[int, int, bool], float] = {}
        kinds: dict[object, int] = {}
        self._kinds = [
            kinds.setdefault(self.neighbourhood(stage), len(kinds))
            for stage in range(self.num_stages)
        ]
        self._loads: list[dict[int, float]] = [{} for _ in kinds]
        self.allowed = [self._allowed(boundary) for boundary in range(self.num_stages + 1)]

    def _all_crossing(self) -> list[list[int]]:
        """For each position, the flows from inside to outside."""
        flows = range(len(self._sources))
        if not self.in_order:
            return [
                [f for f in flows if self._sources[f] & mask and self._targets[f] & ~mask]
                for mask in self.masks
            ]
        found: list[list[int]] = [[] for _ in self.masks]
        sizes = [mask.bit_count() for mask in self.masks]
        for f, flow in enumerate(self.work.flows):
            first = bisect.bisect_left(sizes, flow.source + 1)
            for index in range(first, bisect.bisect_left(sizes, max(flow.targets, default=0) + 1)):
                found[index].append(f)
        return found

    def _sums(self, values: Sequence[float]) -> list[float]:
        if self.in_order:
            sums = list(itertools.accumulate(values, initial=0.0))
            return [sums[mask.bit_count()] for mask in self.masks]
        return [math.fsum(values[i] for i in _items(mask)) for mask in self.masks]

    def _allowed(self, boundary: int) -> list[int]:
        """Positions that may end stage `boundary - 1`."""
        if boundary == 0:
            return [0]
        if boundary == self.num_stages:
            return [len(self.masks) - 1]
        inside = _mask(i for i, stage in self.limits.pins.items() if stage < boundary)
        outside = _mask(i for i, stage in self.limits.pins.items() if stage >= boundary)
        return [
            index
            for index, mask in enumerate(self.masks)
            if boundary <= mask.bit_count() <= len(self.work.items) - self.num_stages + boundary
            and not inside & ~mask
            and not outside & mask
        ]

    def neighbourhood(self, stage: int) -> object:
        """Equal for stages whose transfers cost the same, whatever is transferred."""
        here = self.ranks[stage]
        links = self.limits.links

        def seen(other: int) -> object:
            if other == here:
                return None
            pair = (links.get((here, other)), links.get((other, here)))
            return ("linked", *pair)

        before, after = self.ranks[:stage], self.ranks[stage + 1 :]
        near = (seen(before[-1]) if before else "", seen(after[0]) if after else "")
        return near, frozenset(map(seen, before)), frozenset(map(seen, after))

    def is_before(self, start: int, end: int) -> bool:
        """Whether the stage between two positions exists and is not empty."""
        return start < end and (self.in_order or not self.masks[start] & ~self.masks[end])

    def price(self, flow: int, source_rank: int, target_rank: int) -> float:
        """The time of a flow between two ranks, there and back."""
        key = (flow, source_rank, target_rank)
        if key not in self._prices:
            found = self.limits.transfer(self.work.flows[flow], source_rank, target_rank)
            self._prices[key] = found
        return self._prices[key]

    def load(self, stage: int, start: int, end: int) -> float:
        """The least time that a stage can take, whatever the other stages are.

        It is exact when every flow that leaves the stage is read by one other stage.
        """
        known = self._loads[self._kinds[stage]]
        key = start * len(self.masks) + end
        found = known.get(key)
        if found is None:
            found = known[key] = self._load(stage, start, end)
        return found

    def _load(self, stage: int, start: int, end: int) -> float:
        time = self.before[end] - self.before[start]
        first, last = self.masks[start], self.masks[end]
        body = last & ~first
        # In order, the items right before the stage are on the stage before, and the
        # next ones on the next: for those the other rank is known.
        near = first & ~self.masks[start - 1] if self.in_order and start else 0
        for flow in self._crossing[start]:
            if self._targets[flow] & body:
                time += self._least_price(flow, stage, False, bool(self._sources[flow] & near))
        after = self.masks[end + 1] & ~last if self.in_order and end + 1 < len(self.masks) else 0
        for flow in self._crossing[end]:
            if self._sources[flow] & body:
                time += self._least_price(flow, stage, True, bool(self._targets[flow] & after))
        return time

    def _least_price(self, flow: int, stage: int, leaves: bool, is_next: bool) -> float:
        here = self.ranks[stage]
        if is_next:
            there = self.ranks[stage + 1 if leaves else stage - 1]
            return self.price(flow, *((here, there) if leaves else (there, here)))
        key = (flow, stage, leaves)
        if key not in self._least:
            others = set(self.ranks[stage + 1 :] if leaves else self.ranks[:stage])
            self._least[key] = min(
                self.price(flow, *((here, there) if leaves else (there, here))) for there in others
            )
        return self._least[key]

    def memory(self, start: int, end: int) -> tuple[float, float]:
        """Bytes that a stage holds all the time, and for each microbatch in flight."""
        key = (start, end)
        if key not in self._memory:
            body = self.masks[end] & ~self.masks[start]
            shared = [s for mask, s in self._shared if mask & body]
            state = self._state_before[end] - self._state_before[start]
            residual = self._residual_before[end] - self._residual_before[start]
            self._memory[key] = (
                state + math.fsum(s.state for s in shared),
                residual + math.fsum(s.residual for s in shared),
            )
        return self._memory[key]

    def rank_memory(self, rank: int, states: Sequence[float], residuals: Sequence[float]) -> float:
        """Bytes on a rank at its fullest, from those of its first stages."""
        moments = self.limits.in_flight[rank] if self.limits.in_flight else ()
        held = max(
            (
                math.fsum(n * b for n, b in zip(moment, residuals, strict=False))
                for moment in moments
            ),
            default=math.fsum(residuals),
        )
        return math.fsum(states) + held

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Whether a stage alone fits on its rank."""
        if self.limits.memory is None:
            return True
        rank = self.ranks[stage]
        slot = self.placement.stages_of(rank).index(stage)
        state, residual = self.memory(start, end)
        held = self.rank_memory(rank, [state], [*[0.0] * slot, residual])
        return held <= self.limits.memory[rank]

    def fit_together(self, rank: int, bodies: Sequence[tuple[int, int]]) -> bool:
        """Whether all stages of a rank, given as (start, end), fit on it."""
        if self.limits.memory is None:
            return True
        held = [self.memory(start, end) for start, end in bodies]
        total = self.rank_memory(rank, [s for s, _ in held], [r for _, r in held])
        return total <= self.limits.memory[rank]

    def arrivals(
        self, stage: int, start: int, end: int, stage_of: Sequence[int]
    ) -> list[tuple[int, float]]:
        """What a stage receives: `(source stage, time)` for each flow from another rank."""
        body = self.masks[end] & ~self.masks[start]
        here = self.ranks[stage]
        found = []
        for flow in self._crossing[start]:
            if self._targets[flow] & body:
                source = stage_of[self.work.flows[flow].source]
                if self.ranks[source] != here:
                    found.append((source, self.price(flow, self.ranks[source], here)))
        return found

    def items(self, start: int, end: int) -> list[int]:
        return list(_items(self.masks[end] & ~self.masks[start]))

    def assignment(self, chain: Sequence[int]) -> tuple[int, ...]:
        """The stage of each item for a chain of positions."""
        stage_of = [0] * len(self.work.items)
        for stage, (start, end) in enumerate(itertools.pairwise(chain)):
            for item in self.items(start, end):
                stage_of[item] = stage
        return tuple(stage_of)

    def totals(self, chain: Sequence[int]) -> Totals:
        """What a chain of positions costs, every transfer charged to both of its ends."""
        stage_of = self.assignment(chain)
        times, transfers = [0.0] * self.num_stages, [0.0] * self.num_stages
        num_ranks = self.placement.num_ranks
        states: list[list[float]] = [[] for _ in range(num_ranks)]
        residuals: list[list[float]] = [[] for _ in range(num_ranks)]
        for stage, (start, end) in enumerate(itertools.pairwise(chain)):
            times[stage] = self.before[end] - self.before[start]
            for source, time in self.arrivals(stage, start, end, stage_of):
                transfers[stage] += time
                transfers[source] += time
            if self.limits.memory is not None:
                state, residual = self.memory(start, end)
                states[self.ranks[stage]].append(state)
                residuals[self.ranks[stage]].append(residual)
        loads = [0.0] * num_ranks
        for stage, rank in enumerate(self.ranks):
            loads[rank] += times[stage] + transfers[stage]
        memory = tuple(self.rank_memory(r, states[r], residuals[r]) for r in range(num_ranks))
        return Totals(tuple(times), tuple(transfers), tuple(loads), memory)

    def excess(self, totals: Totals) -> float:
        """By how much the fullest rank is too full; 0 or less if all fit."""
        if self.limits.memory is None:
            return 0.0
        return max(h - m for h, m in zip(totals.rank_memory, self.limits.memory, strict=True))


def _mask(items: Iterable[int]) -> int:
    mask = 0
    for item in items:
        mask |= 1 << item
    return mask


def _items(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
