"""A time that no order of a program's actions can be below.

For each rank, three things cannot be had for less:

    wait until its first input can be there   + all its work
    and, if memory is short: forwards fill the time until its first backward can start
    only as far as memory holds them           + the rest of that time, idle
    its first input, its forwards and backwards + the way of the last gradient to the front

The first is "load and fill", the second grows with a tight memory limit, the third is the
drain. One microbatch's way through all stages is a bound as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.program import Action, Edges, Kind, Program, StageCosts, Value, ValueKind, reads, writes

__all__ = ["lower_bound"]


def lower_bound(
    program: Program, costs: StageCosts, edges: Edges, limits: Sequence[float] | None = None
) -> float:
    """A lower bound on the makespan of every order of the program's actions."""
    ways = _Ways(program, costs, edges)
    bound = ways.longest
    for rank, actions in enumerate(program.ranks):
        parts = [part for action in actions for part in action.parts or (action,)]
        saved = math.fsum(
            math.fsum(costs.compute(p.kind, p.stage) for p in action.parts)
            - costs.pair([(p.kind, p.stage) for p in action.parts])
            for action in actions
            if action.parts
        )
        work = math.fsum(costs.compute(part.kind, part.stage) for part in parts) - saved
        head = min(ways.earliest[part.kind, part.stage] for part in parts)
        idle = _forced_idle(program, costs, rank, ways, head, limits)
        bound = max(bound, head + idle + work, ways.with_drain(parts, head, saved))
    return bound


class _Ways:
    """The quickest way of one microbatch to and from each action, if nobody else ran."""

    def __init__(self, program: Program, costs: StageCosts, edges: Edges) -> None:
        self._costs, self._rank_of = costs, program.placement.stage_to_rank
        kinds = {
            part.kind
            for acts in program.ranks
            for action in acts
            for part in action.parts or (action,)
        }
        order = [
            *((Kind.FORWARD, s) for s in range(program.num_stages)),
            *(
                (kind, s)
                for s in reversed(range(program.num_stages))
                for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
                if kind in kinds
            ),
        ]
        ready: dict[Value, float] = {}
        self.earliest: dict[tuple[Kind, int], float] = {}
        ends = [0.0]
        for kind, stage in order:
            action = Action(kind, stage, 0)
            start = max((self._arrival(v, ready) for v in reads(action, edges)), default=0.0)
            end = start + costs.compute(kind, stage)
            self.earliest[kind, stage] = start
            ends.append(end)
            for value in writes(action, edges):
                ready[value] = min(ready.get(value, math.inf), end)
        self.longest = max(ends) if len(kinds) < 4 else 0.0
        self._drain = self._tails(program, edges, kinds)

    def _arrival(self, value: Value, ready: dict[Value, float]) -> float:
        return ready[value] + self._transfer(value)

    def _transfer(self, value: Value) -> float:
        source, target = self._rank_of[value.stage], self._rank_of[value.peer]
        if source == target:
            return 0.0
        size = self._costs.value_bytes(value.kind, value.stage, value.peer)
        return self._costs.transfer(source, target, size)

    def _tails(self, program: Program, edges: Edges, kinds: set[Kind]) -> list[float]:
        """From the end of a stage's backward (or input half) to the end of the last action."""
        half = Kind.BACKWARD_INPUT if Kind.BACKWARD_INPUT in kinds else Kind.BACKWARD
        has_weight = Kind.BACKWARD not in kinds and Kind.BACKWARD_WEIGHT in kinds
        tails: list[float] = []
        for stage in range(program.num_stages):
            own = self._costs.compute(Kind.BACKWARD_WEIGHT, stage) if has_weight else 0.0
            onward = [
                self._transfer(Value(ValueKind.GRADIENT, stage, edge.source, 0))
                + self._costs.compute(half, edge.source)
                + tails[edge.source]
                for edge in edges.into(stage)
                if edge.has_gradient
            ]
            tails.append(max([own, *onward]))
        return tails

    def with_drain(self, parts: Sequence[Action], head: float, saved: float) -> float:
        """The rank's forwards and backwards without weight halves, then the way to the front."""
        main = [p for p in parts if p.kind is not Kind.BACKWARD_WEIGHT]
        work = math.fsum(self._costs.compute(p.kind, p.stage) for p in main) - saved
        backwards = [p.stage for p in main if p.kind is not Kind.FORWARD]
        if not backwards:
            return 0.0
        # Whatever ends last among them is a backward of some stage of the rank.
        return head + work + min(self._drain[stage] for stage in backwards)


def _forced_idle(
    program: Program,
    costs: StageCosts,
    rank: int,
    ways: _Ways,
    head: float,
    limits: Sequence[float] | None,
) -> float:
    """How long a rank must wait for its first backward because memory holds no more forwards."""
    stages = program.placement.stages_of(rank)
    backwards = [
        start
        for (kind, stage), start in ways.earliest.items()
        if stage in stages and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    ]
    if limits is None or math.isinf(limits[rank]) or not backwards:
        return 0.0
    # The most forward time per byte comes first, as in a knapsack that may be cut.
    rates = sorted(
        (
            costs.compute(Kind.FORWARD, stage)
            / max(costs.value_bytes(ValueKind.RESIDUAL, stage, stage), 1e-300),
            costs.compute(Kind.FORWARD, stage),
        )
        for stage in stages
    )
    filled, room = 0.0, limits[rank] * (1 + 1e-9)
    for rate, forward in reversed(rates):
        time = min(forward * program.num_microbatches, rate * room)
        filled += time
        room -= time / rate if rate else 0.0
    return max(0.0, min(backwards) - head - filled)
