"""Orders of a program's actions that are quickly changed, filled and timed.

In:  a compute-only program, costs, edges and a memory limit per rank.
Out: `Orders`. `fill` takes the order of forwards and input gradients on each rank, puts each
     weight gradient where the rank would wait otherwise, or where memory must be freed, and
     times the result; `moved` makes another order.

Transfers take their time beside the ranks; costs that do not overlap them add it to the
actions at both ends.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fxpipe.errors import PlanError
from fxpipe.program import Action, Edges, Kind, Program, StageCosts, reads, writes
from fxpipe.program.memory import kept_at_ends
from fxpipe.program.play.engine import Times, cost_times
from fxpipe.program.play.fill import FillWeights
from fxpipe.program.play.numbering import Numbering

__all__ = ["Objective", "Orders", "Ranks", "Timing", "check_objective"]

Objective = Literal["step", "period"]
"""What is to be short: one step by itself, or the time from step to step without a barrier."""

Ranks = tuple[tuple[Action, ...], ...]


def check_objective(objective: object) -> None:
    """Refuse what is no objective."""
    if objective not in get_args(Objective):
        raise PlanError(f"objective is {objective!r}; known: {', '.join(get_args(Objective))}")


"""Actions of each rank."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A complete order of each rank, how long each takes, and what actions waited for.

    `spans[rank]` is the time that counts: to the rank's end, from the step's start or, if the
    period counts, from the rank's own. `causes` names for each action the one whose end let it
    start, if there is one.
    """

    ranks: Ranks
    causes: Mapping[Action, Action]
    spans: tuple[float, ...]

    @property
    def length(self) -> float:
        return max(self.spans)

    def critical_path(self) -> list[Action]:
        """The last action of the slowest rank, what let it start, and so on."""
        slowest = max(range(len(self.ranks)), key=lambda rank: self.spans[rank])
        path = [self.ranks[slowest][-1]]
        while path[-1] in self.causes:
            path.append(self.causes[path[-1]])
        return path


class Orders:
    """What is the same for all orders of a program's actions.

    `main` is the program's own order without weight gradients.
    """

    def __init__(
        self,
        program: Program,
        costs: StageCosts,
        edges: Edges,
        limits: Sequence[float],
        objective: Objective = "step",
    ) -> None:
        self.program, self._limits, self._objective = program, limits, objective
        self.main: Ranks = tuple(
            tuple(action for action in actions if action.kind is not Kind.BACKWARD_WEIGHT)
            for actions in program.ranks
        )
        self._numbering = Numbering.of(program, edges)
        self._times = _times(program, costs, edges)
        self._maker = {
            value: action
            for actions in program.ranks
            for action in actions
            for value in self._numbering.writes_of(action)
        }
        self._follows = {action: self._before(action) for rank in self.main for action in rank}
        self._kept = kept_at_ends(
            lambda kind, stage: costs.value_bytes(kind, stage, stage), program.num_stages
        )

    def _before(self, action: Action) -> frozenset[Action]:
        """Which actions of its own rank an action must follow; some may be of other ranks."""
        # Microbatches are alike: of one kind and stage they keep their order.
        parts = [part for part in action.each if part.microbatch]
        earlier = {part._replace(microbatch=(part.microbatch or 0) - 1) for part in parts}
        return frozenset(self._maker[value] for value in self._numbering.reads_of(action)) | earlier

    def fill(self, main: Ranks, patience: Sequence[float]) -> Timing | None:
        """Put weight gradients into the holes of an order without them, and time it.

        A rank fills a known wait only if it lasts at least `patience[rank]` weight
        gradients. None if memory or the ranks get stuck.
        """
        play = FillWeights(
            main,
            self._numbering,
            self._times,
            kept=self._kept,
            limits=self._limits,
            patience=patience,
        )
        play.run()
        if not play.is_complete:
            return None
        causes, starts = {}, [0.0] * len(main)
        for _, rank, at, start, late in play.done:
            actions = play.ranks[rank]
            if late >= 0:
                causes[actions[at]] = self._maker[late]
            elif at:
                causes[actions[at]] = actions[at - 1]
            if not at and self._objective == "period":
                starts[rank] = start
        spans = (end - start for start, end in zip(starts, play.free_at, strict=True))
        return Timing(tuple(map(tuple, play.ranks)), causes, tuple(spans))

    def moved(self, main: Ranks, timing: Timing, rng: random.Random) -> Ranks | None:
        """The order with one action a few places further, mostly one on the critical path.

        None if that is not possible.
        """
        on_path = rng.random() < 0.8
        action = rng.choice(timing.critical_path() if on_path else rng.choice(main))
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None
        rank = self.program.placement.stage_to_rank[action.stage]
        order = main[rank]
        at = order.index(action)
        to = at + rng.choice((-1, -1, -1, 1, 1, 1, -2, 2, -3, 3, -4, 4, -6, 6))
        if not 0 <= to < len(order):
            return None
        if to < at and not self._follows[action].isdisjoint(self._named(order[to:at])):
            return None
        passed = {action, *action.parts}
        if any(not passed.isdisjoint(self._follows[other]) for other in order[at + 1 : to + 1]):
            return None
        changed = [*order[:at], *order[at + 1 :]]
        changed.insert(to, action)
        return (*main[:rank], tuple(changed), *main[rank + 1 :])

    @staticmethod
    def _named(actions: Sequence[Action]) -> set[Action]:
        return {named for action in actions for named in (action, *action.parts)}


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
