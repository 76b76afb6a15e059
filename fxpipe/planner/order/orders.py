"""A program as numbers, so that thousands of variants can be timed per second.

In:  a compute-only program, costs, edges and a memory limit per rank.
Out: `Orders`: actions as numbers, and two ways to time an order of them.

`time_of` takes a complete order of each rank and gives its end times: an action starts
when the one before it on its rank has ended and what it reads has arrived. `fill` takes
only the order of forwards and input gradients and puts each weight gradient where the
rank would wait otherwise, or where memory must be freed. Transfers take their time
beside the ranks; costs that do not overlap them add it to the actions at both ends.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.program import Action, Costs, Edges, Kind, Program, ValueKind, reads, writes

__all__ = ["Orders", "Timing"]

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Timing:
    """When each action ends, and which action's end let it start (-1: none)."""

    ranks: tuple[tuple[int, ...], ...]
    ends: Sequence[float]
    causes: Sequence[int]
    rank_ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.rank_ends)

    def critical_path(self) -> list[int]:
        """Actions of which each let the next one start; the last one ends last."""
        slowest = max(range(len(self.ranks)), key=lambda rank: self.rank_ends[rank])
        path, action = [], self.ranks[slowest][-1]
        while action >= 0:
            path.append(action)
            action = self.causes[action]
        return path[::-1]


class Orders:
    """The actions of a program by number: rank, duration, needs and memory of each."""

    def __init__(
        self, program: Program, costs: Costs, edges: Edges, limits: Sequence[float]
    ) -> None:
        self.program, self.limits, self._costs = program, limits, costs
        self.actions: list[Action] = []
        self.ranks: list[tuple[int, ...]] = []
        self.rank_of: list[int] = []
        for rank, actions in enumerate(program.ranks):
            first = len(self.actions)
            self.actions += actions
            self.ranks.append(tuple(range(first, len(self.actions))))
            self.rank_of += [rank] * len(actions)
        self.durations = [_duration(action, costs) for action in self.actions]
        self.needs: list[tuple[tuple[int, float], ...]] = []
        self.local: list[frozenset[int]] = []
        self._find_needs(costs, edges)
        self.takes = [_bytes(action, costs, is_start=True) for action in self.actions]
        self.gives = [_bytes(action, costs, is_start=False) for action in self.actions]
        self.is_weight = [action.kind is Kind.BACKWARD_WEIGHT for action in self.actions]
        self.weights_of = self._weights()

    def _find_needs(self, costs: Costs, edges: Edges) -> None:
        maker = {
            value: number
            for number, action in enumerate(self.actions)
            for value in writes(action, edges)
        }
        by_action = {
            part: number
            for number, action in enumerate(self.actions)
            for part in action.parts or (action,)
        }
        for number, action in enumerate(self.actions):
            here, needs, local = self.rank_of[number], [], set()
            for value in reads(action, edges):
                made = maker[value]
                if self.rank_of[made] == here:
                    local.add(made)
                else:
                    size = costs.value_bytes(value.kind, value.stage, value.peer)
                    time = costs.transfer(self.rank_of[made], here, size)
                    needs.append((made, 0.0 if not costs.overlaps_transfers else time))
                    if not costs.overlaps_transfers:
                        self.durations[number] += time
                        self.durations[made] += time
            # Microbatches are alike: of one kind and stage they keep their order.
            for part in action.parts or (action,):
                if part.microbatch:
                    before = by_action.get(part._replace(microbatch=part.microbatch - 1), number)
                    local.add(before)
            self.needs.append(tuple(needs))
            self.local.append(frozenset(local - {number}))

    def _weights(self) -> list[tuple[int, ...]]:
        """For each action the weight gradients that it makes possible."""
        number = {a: n for n, a in enumerate(self.actions) if a.kind is Kind.BACKWARD_WEIGHT}
        return [
            tuple(
                number[part._replace(kind=Kind.BACKWARD_WEIGHT)]
                for part in action.parts or (action,)
                if part.kind is Kind.BACKWARD_INPUT
            )
            for action in self.actions
        ]

    def kept(self, stage: int) -> tuple[float, float]:
        """Bytes that a microbatch keeps on a stage, before and after its input gradient."""
        return (
            self._costs.value_bytes(ValueKind.RESIDUAL, stage, stage),
            self._costs.value_bytes(ValueKind.DEFERRED, stage, stage),
        )

    def scaled(self, factor: float) -> Orders:
        """The same orders with all times multiplied and rounded to whole numbers."""
        other = copy.copy(self)
        other.durations = [float(round(time * factor)) for time in self.durations]
        other.needs = [
            tuple((made, float(round(lag * factor))) for made, lag in needs) for needs in self.needs
        ]
        return other

    def as_program(self, ranks: Sequence[Sequence[int]], name: str) -> Program:
        return Program.of(
            self.program.placement,
            self.program.num_microbatches,
            [[self.actions[n] for n in rank] for rank in ranks],
            name=name,
        )

    def main(self) -> list[tuple[int, ...]]:
        """Each rank's order without weight gradients."""
        return [tuple(n for n in rank if not self.is_weight[n]) for rank in self.ranks]

    def fits(self, rank: int, order: Sequence[int]) -> bool:
        """Whether a rank's complete order stays within its memory."""
        held, limit = 0.0, self.limits[rank] * (1 + _TOLERANCE)
        for number in order:
            held += self.takes[number]
            if held > limit:
                return False
            held += self.gives[number]
        return True

    def time_of(self, ranks: Sequence[tuple[int, ...]]) -> Timing | None:
        """Time a complete order of each rank; None if ranks wait for each other."""
        ends, causes = [-1.0] * len(self.actions), [-1] * len(self.actions)
        durations, needs = self.durations, self.needs
        position, free, last = [0] * len(ranks), [0.0] * len(ranks), [-1] * len(ranks)
        waiting: dict[int, list[int]] = {}
        stack = list(range(len(ranks)))
        while stack:
            rank = stack.pop()
            order, at, now, before = ranks[rank], position[rank], free[rank], last[rank]
            while at < len(order):
                number = order[at]
                start, cause = now, before
                for made, lag in needs[number]:
                    if ends[made] < 0:
                        waiting.setdefault(made, []).append(rank)
                        cause = -2
                        break
                    if ends[made] + lag > start:
                        start, cause = ends[made] + lag, made
                if cause == -2:
                    break
                now = start + durations[number]
                ends[number], causes[number], before = now, cause, number
                at += 1
                if number in waiting:
                    stack += waiting.pop(number)
            position[rank], free[rank], last[rank] = at, now, before
        if any(at < len(order) for at, order in zip(position, ranks, strict=True)):
            return None
        return Timing(tuple(ranks), ends, causes, tuple(free))

    def fill(self, main: Sequence[tuple[int, ...]], patience: Sequence[float]) -> Timing | None:
        """Put weight gradients into the holes of an order without them, and time it.

        A rank fills a known wait only if it lasts at least `patience[rank]` weight
        gradients. None if memory or the ranks get stuck.
        """
        return _Filling(self, main, patience).run()


class _Filling:
    """The state of one `fill`: ranks in the order of time, each with its waiting weights."""

    def __init__(
        self, orders: Orders, main: Sequence[tuple[int, ...]], patience: Sequence[float]
    ) -> None:
        count = len(main)
        self.orders, self.main, self.patience = orders, main, patience
        self.ends, self.causes = [-1.0] * len(orders.actions), [-1] * len(orders.actions)
        self.position, self.held, self.last = [0] * count, [0.0] * count, [-1] * count
        self.weights: list[list[int]] = [[] for _ in main]
        self.next_weight = [0] * count
        self.ranks: list[list[int]] = [[] for _ in main]
        self.blocked: dict[int, list[int]] = {}
        self.heap = [(0.0, rank) for rank in range(count)]

    def run(self) -> Timing | None:
        heap = self.heap
        while heap:
            now, rank = heapq.heappop(heap)
            then = self._step(rank, now)
            if then is not None:
                heapq.heappush(heap, (then, rank))
        lengths = (len(rank) for rank in self.orders.ranks)
        if any(len(done) < length for done, length in zip(self.ranks, lengths, strict=True)):
            return None
        rank_ends = tuple(self.ends[rank[-1]] for rank in self.ranks)
        return Timing(tuple(map(tuple, self.ranks)), self.ends, self.causes, rank_ends)

    def _step(self, rank: int, now: float) -> float | None:
        """Let a rank act at a time; returns when it wants to act next, None if it is stuck."""
        orders, ends = self.orders, self.ends
        at, has_weight = self.position[rank], self.next_weight[rank] < len(self.weights[rank])
        if at == len(self.main[rank]):
            return self._run_weight(rank, now) if has_weight else None
        number = self.main[rank][at]
        limit = orders.limits[rank] * (1 + _TOLERANCE)
        if self.held[rank] + orders.takes[number] > limit:
            return self._run_weight(rank, now) if has_weight else None
        arrival, cause = now, self.last[rank]
        for made, lag in orders.needs[number]:
            if ends[made] < 0:
                if has_weight:
                    return self._run_weight(rank, now)
                self.blocked.setdefault(made, []).append(rank)
                return None
            if ends[made] + lag > arrival:
                arrival, cause = ends[made] + lag, made
        if has_weight and arrival > now:
            weight = self.weights[rank][self.next_weight[rank]]
            if arrival - now >= self.patience[rank] * orders.durations[weight] - _TOLERANCE:
                return self._run_weight(rank, now)
        self.position[rank] += 1
        self.weights[rank] += orders.weights_of[number]
        return self._run(rank, number, arrival, cause)

    def _run_weight(self, rank: int, now: float) -> float:
        number = self.weights[rank][self.next_weight[rank]]
        self.next_weight[rank] += 1
        return self._run(rank, number, now, self.last[rank])

    def _run(self, rank: int, number: int, start: float, cause: int) -> float:
        orders = self.orders
        end = start + orders.durations[number]
        self.ends[number], self.causes[number], self.last[rank] = end, cause, number
        self.held[rank] += orders.takes[number] + orders.gives[number]
        self.ranks[rank].append(number)
        for other in self.blocked.pop(number, ()):
            heapq.heappush(self.heap, (start, other))
        return end


def _duration(action: Action, costs: Costs) -> float:
    if action.parts:
        return costs.pair([(part.kind, part.stage) for part in action.parts])
    return costs.compute(action.kind, action.stage)


def _bytes(action: Action, costs: Costs, *, is_start: bool) -> float:
    """What an action adds to its rank's memory when it starts, or when it ends."""
    total = 0.0
    for kind, stage, *_ in action.parts or (action,):
        residual = costs.value_bytes(ValueKind.RESIDUAL, stage, stage)
        deferred = costs.value_bytes(ValueKind.DEFERRED, stage, stage)
        if is_start:
            total += residual if kind is Kind.FORWARD else 0.0
        elif kind is Kind.BACKWARD:
            total -= residual
        elif kind is Kind.BACKWARD_INPUT:
            total += deferred - residual
        elif kind is Kind.BACKWARD_WEIGHT:
            total -= deferred
    return total
