"""Where a stage may end, and what the work between two such places costs.

A *position* is a set of items that is closed under "what feeds it": all that has
run before a cut. In the order of the model these are its prefixes; a model with
branches has more. A stage is the difference of two positions, so choosing stages
is choosing a chain of positions, and pins and groups only strike positions out.

Positions are bit masks over items and are named by their index in `Cuts.masks`.
"""

from __future__ import annotations

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
    """What a chain of positions costs in truth: the time and the bytes of each rank."""

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
        self._are_prefixes = all(mask & (mask + 1) == 0 for mask in self.masks)
        self.before = self._sums([item.time for item in work.items])
        self.total = self.before[-1]
        self._state_before = self._sums([item.state for item in work.items])
        self._residual_before = self._sums([item.residual for item in work.items])
        self._memory: dict[tuple[int, int], tuple[float, float]] = {}
        self._sources = [1 << flow.source for flow in work.flows]
        self._targets = [_mask(flow.targets) for flow in work.flows]
        # For each position, the flows from inside to outside.
        self._crossing = [
            [f for f, s in enumerate(self._sources) if s & mask and self._targets[f] & ~mask]
            for mask in self.masks
        ]
        self._shared = [(_mask(s.items), s) for s in work.shared]
        self._most_in_flight = [self._in_flight(stage) for stage in range(self.num_stages)]
        self._prices: dict[tuple[int, int, int], float] = {}
        self._least: dict[tuple[int, int, bool], float] = {}
        kinds: dict[object, int] = {}
        self._kinds = [
            kinds.setdefault(self.neighbourhood(stage), len(kinds))
            for stage in range(self.num_stages)
        ]
        self._loads: list[dict[int, float]] = [{} for _ in kinds]
        self.allowed = [self._allowed(boundary) for boundary in range(self.num_stages + 1)]

    def _in_flight(self, stage: int) -> int:
        """The most microbatches of a stage that its rank holds in one moment."""
        if not self.limits.in_flight:
            return 1
        rank = self.ranks[stage]
        slot = self.placement.stages_of(rank).index(stage)
        return max((moment[slot] for moment in self.limits.in_flight[rank]), default=1)

    def _sums(self, values: Sequence[float]) -> list[float]:
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
        key = (flow, self._kinds[stage], leaves)
        if key not in self._least:
            others = set(self.ranks[stage + 1 :] if leaves else self.ranks[:stage])
            self._least[key] = min(
                self.price(flow, *((here, there) if leaves else (there, here))) for there in others
            )
        return self._least[key]

    def memory(self, start: int, end: int) -> tuple[float, float]:
        """Bytes that a stage holds all the time, and for each microbatch in flight.

        None are counted if memory is not limited.
        """
        if self.limits.memory is None:
            return 0.0, 0.0
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

    def rank_memory(self, rank: int, held: Sequence[tuple[float, float]]) -> float:
        """Bytes on a rank at its fullest, from `memory` of its first stages."""
        moments = self.limits.in_flight[rank] if self.limits.in_flight else ()
        kept = [
            math.fsum(n * residual for n, (_, residual) in zip(moment, held, strict=False))
            for moment in moments
        ]
        most = max(kept, default=math.fsum(residual for _, residual in held))
        return math.fsum(state for state, _ in held) + most

    def is_within(self, rank: int, held: Sequence[tuple[float, float]]) -> bool:
        """Whether a rank can hold its first stages."""
        memory = self.limits.memory
        return memory is None or self.rank_memory(rank, held) <= memory[rank]

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Whether a stage alone fits on its rank."""
        if self.limits.memory is None:
            return True
        return self.alone(stage, start, end) <= self.limits.memory[self.ranks[stage]]

    def alone(self, stage: int, start: int, end: int) -> float:
        """Bytes on a rank that has this stage only."""
        state, residual = self.memory(start, end)
        return state + self._most_in_flight[stage] * residual

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

    def items(self, start: int, end: int) -> Sequence[int]:
        first, last = self.masks[start], self.masks[end]
        if self._are_prefixes:
            return range(first.bit_length(), last.bit_length())
        return list(_items(last & ~first))

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
        loads = [0.0] * self.placement.num_ranks
        held: list[list[tuple[float, float]]] = [[] for _ in loads]
        for stage, (start, end) in enumerate(itertools.pairwise(chain)):
            loads[self.ranks[stage]] += self.before[end] - self.before[start]
            for source, time in self.arrivals(stage, start, end, stage_of):
                loads[self.ranks[stage]] += time
                loads[self.ranks[source]] += time
            held[self.ranks[stage]].append(self.memory(start, end))
        memory = tuple(self.rank_memory(rank, own) for rank, own in enumerate(held))
        return Totals(tuple(loads), memory)

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
