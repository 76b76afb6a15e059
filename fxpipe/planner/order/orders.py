"""A program's actions as numbers, so that orders of them are quickly changed and timed.

In:  a compute-only program, costs, edges and a memory limit per rank.
Out: `Orders`: actions as numbers, and two ways to time an order of them.

`time_of` plays a complete order of each rank. `fill` takes only the order of forwards and
input gradients and puts each weight gradient where the rank would wait otherwise, or where
memory must be freed. Transfers take their time beside the ranks; costs that do not overlap
them add it to the actions at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxpipe.program import Action, Edges, Kind, Program, StageCosts, reads, writes
from fxpipe.program.memory import kept_at_ends
from fxpipe.program.play.engine import Play, Times, cost_times
from fxpipe.program.play.fill import FillWeights
from fxpipe.program.play.numbering import Numbering

__all__ = ["Objective", "Orders", "Timing"]

Objective = Literal["step", "period"]
"""What is to be short: one step by itself, or the time from step to step without a barrier."""

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Timing:
    """An order of each rank, how long each rank takes, what each action waited for (-1: none).

    `spans[rank]` is the time that counts: to the rank's end, from the step's start or, if the
    period counts, from the rank's own.
    """

    ranks: tuple[tuple[int, ...], ...]
    causes: Sequence[int]
    spans: tuple[float, ...]

    @property
    def length(self) -> float:
        return max(self.spans)

    def critical_path(self) -> list[int]:
        """Actions of which each let the next one start, up to the end of the slowest rank."""
        slowest = max(range(len(self.ranks)), key=lambda rank: self.spans[rank])
        path, action = [], self.ranks[slowest][-1]
        while action >= 0:
            path.append(action)
            action = self.causes[action]
        return path[::-1]


class Orders:
    """The actions of a program by number: rank, duration, and what must come before each.

    `local[number]` are the actions of its own rank that an action must follow.
    """

    def __init__(
        self,
        program: Program,
        costs: StageCosts,
        edges: Edges,
        limits: Sequence[float],
        objective: Objective = "step",
    ) -> None:
        self.program, self.limits, self.objective = program, limits, objective
        self.actions = [action for actions in program.ranks for action in actions]
        self.rank_of = [r for r, actions in enumerate(program.ranks) for _ in actions]
        self._number = {action: number for number, action in enumerate(self.actions)}
        self.ranks = [tuple(self._number[a] for a in actions) for actions in program.ranks]
        self.is_weight = [action.kind is Kind.BACKWARD_WEIGHT for action in self.actions]
        self._numbering = Numbering.of(program, edges)
        self._times = _times(program, costs, edges)
        self.durations = [
            self._times.pair(a) if a.parts else self._times.compute[a.kind][a.stage]
            for a in self.actions
        ]
        self._maker = {
            value: number
            for number, action in enumerate(self.actions)
            for value in self._numbering.writes_of(action)
        }
        self.local = self._find_local()
        self._kept = kept_at_ends(
            lambda kind, stage: costs.value_bytes(kind, stage, stage), program.num_stages
        )

    def _find_local(self) -> list[frozenset[int]]:
        by_part = {part: n for n, a in enumerate(self.actions) for part in a.parts or (a,)}
        found = []
        for number, action in enumerate(self.actions):
            makers = {self._maker[value] for value in self._numbering.reads_of(action)}
            local = {made for made in makers if self.rank_of[made] == self.rank_of[number]}
            # Microbatches are alike: of one kind and stage they keep their order.
            for part in action.parts or (action,):
                if part.microbatch:
                    before = part._replace(microbatch=part.microbatch - 1)
                    local.add(by_part.get(before, number))
            found.append(frozenset(local - {number}))
        return found

    def as_program(self, ranks: Sequence[Sequence[int]], name: str) -> Program:
        return Program.of(
            self.program.placement, self.program.num_microbatches, self._actions(ranks), name=name
        )

    def main(self) -> list[tuple[int, ...]]:
        """Each rank's order without weight gradients."""
        return [tuple(n for n in rank if not self.is_weight[n]) for rank in self.ranks]

    def fits(self, rank: int, order: Sequence[int]) -> bool:
        """Whether a rank's complete order stays within its memory."""
        held, limit = 0.0, self.limits[rank] * (1 + _TOLERANCE)
        for number in order:
            takes, gives = self._kept(self.actions[number])
            if held + takes > limit:
                return False
            held += takes + gives
        return True

    def time_of(self, ranks: Sequence[tuple[int, ...]]) -> Timing | None:
        """Time a complete order of each rank; None if ranks wait for each other."""
        play = Play(self._actions(ranks), self._numbering, self._times)
        play.run()
        return self._timing(play, ranks) if play.is_complete else None

    def fill(self, main: Sequence[tuple[int, ...]], patience: Sequence[float]) -> Timing | None:
        """Put weight gradients into the holes of an order without them, and time it.

        A rank fills a known wait only if it lasts at least `patience[rank]` weight
        gradients. None if memory or the ranks get stuck.
        """
        play = FillWeights(
            self._actions(main),
            self._numbering,
            self._times,
            kept=self._kept,
            limits=self.limits,
            patience=patience,
        )
        play.run()
        if not play.is_complete:
            return None
        return self._timing(play, [tuple(self._number[a] for a in rank) for rank in play.ranks])

    def _actions(self, ranks: Sequence[Sequence[int]]) -> list[list[Action]]:
        return [[self.actions[number] for number in rank] for rank in ranks]

    def _timing(self, play: Play, ranks: Sequence[tuple[int, ...]]) -> Timing:
        causes = [-1] * len(self.actions)
        starts = [0.0] * len(ranks)
        for _, rank, at, start, late in play.done:
            order = ranks[rank]
            causes[order[at]] = self._maker[late] if late >= 0 else order[at - 1] if at else -1
            if not at and self.objective == "period":
                starts[rank] = start
        spans = (end - start for start, end in zip(starts, play.free_at, strict=True))
        return Timing(tuple(ranks), causes, tuple(spans))


def _times(program: Program, costs: StageCosts, edges: Edges) -> Times:
    """The costs as times; transfers that nothing overlaps are part of the actions at their ends."""
    times = cost_times(costs, program.num_stages)
    if costs.overlaps_transfers:
        return times
    rank_of = program.placement.stage_to_rank

    def moved(action: Action) -> float:
        values = {*reads(action, edges), *writes(action, edges)}
        routes = [(rank_of[value.stage], rank_of[value.peer], value) for value in values]
        return sum(times.transfer(a, b, value) for a, b, value in routes if a != b)

    return Times(
        [
            [took + moved(Action(kind, stage, 0)) for stage, took in enumerate(row)]
            for kind, row in zip(Kind, times.compute, strict=False)
        ],
        transfer=lambda source, target, value: 0.0,
        pair=lambda action: times.pair(action) + moved(action),
    )
