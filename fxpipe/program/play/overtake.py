"""Run each rank's order as early as it goes, letting ready actions overtake.

Of the actions that are ready a rank takes the one that comes first in its order; a forward
only if that leaves at most `limit` residuals, or if it is the very next. So the action that
is first in time is never held up, and no rank waits forever. Microbatches of one kind and
stage keep their order. A forward takes one unit of time and a backward two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from fxpipe.program.action import Action, Edges, Kind
from fxpipe.program.play.engine import Dispatch, unit_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Placement

__all__ = ["overtaking"]


def overtaking(
    placement: Placement,
    num_microbatches: int,
    orders: Sequence[Sequence[Action]],
    *,
    limit: float = math.inf,
) -> list[list[Action]]:
    """Each rank's forwards and whole backwards in the order in which they are taken."""
    numbering = Numbering(placement, Edges.chain(placement.num_stages), num_microbatches)
    play = _Overtaking(orders, numbering, limit, placement.num_stages)
    play.run()
    assert sum(map(len, play.ranks)) == sum(map(len, orders)), "ranks wait for each other"
    return play.ranks


class _Overtaking(Dispatch):
    """`_lanes[rank]` holds a queue for each kind and stage, of `(place in the order, action)`."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], numbering: Numbering, limit: float, stages: int
    ) -> None:
        super().__init__(len(orders), numbering, unit_times(stages))
        self._limit, self._live = limit, [0] * len(orders)
        self._lanes: list[list[deque[tuple[int, Action]]]] = []
        for order in orders:
            lanes: dict[tuple[Kind, int], deque[tuple[int, Action]]] = {}
            for place, action in enumerate(order):
                lanes.setdefault((action.kind, action.stage), deque()).append((place, action))
            self._lanes.append(list(lanes.values()))

    def choose(self, rank: int, now: float) -> Action | None:
        lanes = self._lanes[rank] = [lane for lane in self._lanes[rank] if lane]
        ready, soonest = [], math.inf
        for lane in lanes:
            time, missing = self.arrival(lane[0][1])
            if missing >= 0:
                self.wait(rank, missing)
            elif time <= now:
                ready.append(lane)
            else:
                soonest = min(soonest, time)
        taken = self._first(rank, ready)
        if taken is None:
            if soonest < math.inf:
                self.ask_again(rank, soonest)
            return None
        _, action = taken.popleft()
        self._live[rank] += 1 if action.kind is Kind.FORWARD else -1
        return action

    def _first(
        self, rank: int, ready: list[deque[tuple[int, Action]]]
    ) -> deque[tuple[int, Action]] | None:
        forward = min((lane for lane in ready if lane[0][1].kind is Kind.FORWARD), default=None)
        backward = min((lane for lane in ready if lane[0][1].kind.is_backward), default=None)
        if forward is not None and self._live[rank] >= self._limit:
            very_next = min(lane[0][0] for lane in self._lanes[rank])
            if forward[0][0] != very_next:
                forward = None
        if forward is None or backward is None:
            return forward or backward
        return min(forward, backward)
