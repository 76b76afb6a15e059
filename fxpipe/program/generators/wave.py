"""A schedule on a V that is repeated: down the ranks, up again, down again, ...

Where the V turns, a stage and the next one share a rank, so fewer messages are
sent than on a loop of as many stages (after the wave-like pipelines of Hanayo).

The program comes from a timetable that would repeat forever: time is cut into
slots with room for one forward and one backward; a microbatch moves on by one
stage per slot; the next microbatch follows as many slots later as a rank has
stages. With an even number of stages per rank no two forwards of a rank meet in a
slot: those on the way down take even slots and those on the way up odd ones
(relative to the rank), if each turn is put off by the slot or two that this
needs. With an odd number some do meet, and the program waits a little more.

At both ends the timetable has holes. `overtaking` runs it as early as it goes and, where a
rank would wait, takes what is due next: of the actions that are ready the one that comes
first in the rank's order; a forward only if that leaves at most `limit` residuals, or if it is
the very next. So the action that is first in time is never held up, and no rank waits forever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from fxpipe.program.action import Action, Edges, Kind
from fxpipe.program.generators.entry import SEVERAL, schedule
from fxpipe.program.play.engine import Dispatch, unit_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Placement

__all__ = ["overtaking", "wave"]


@schedule(
    "Wave", SEVERAL, "Hanayo", style="v",
    what="1F1B on a V that repeats, with fewer messages than a loop.",
    when="Slow links and a backward that cannot be split.",
)  # fmt: skip
def wave(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Alternate forwards and backwards along a repeated V.

    Two ranks, four stages, four microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3B0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 3B3 0B1 0B2 0B3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2B3 1B3

    With p ranks, m >= 3 p microbatches and two stages per rank it waits as little
    as interleaved 1F1B, (p - 1) / (2 m + p - 1) of the time (from 2 p on, within a few
    forwards of a stage of that), for the same memory, and sends fewer messages. More
    stages per rank shorten the waiting further, but less than on a loop: p = 8, m = 32
    measures 9.9 % idle for two, 10.0 % for three and 7.9 % for four stages per rank.
    A rank holds at most p + (p - 1) / v + 1/2 microbatches of its layers with v stages
    per rank.
    """
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    per_rank = num_stages // num_ranks
    forward, backward = _timetable(num_ranks, per_rank)
    orders = []
    for rank in range(num_ranks):
        due = [
            (slots[stage] + per_rank * microbatch, Action(kind, stage, microbatch))
            for kind, slots in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward))
            for stage in placement.stages_of(rank)
            for microbatch in range(num_microbatches)
        ]
        orders.append([action for _, action in sorted(due)])
    limit = num_stages + num_ranks - 1
    return overtaking(placement, num_microbatches, orders, limit=limit)


def _timetable(num_ranks: int, per_rank: int) -> tuple[list[int], list[int]]:
    """The slots in which the first microbatch is in each stage, forward and backward."""
    legs = [range(leg * num_ranks, (leg + 1) * num_ranks) for leg in range(per_rank)]
    forward, start = _travel(legs, num_ranks, is_down=True, start=0)
    back = [leg[::-1] for leg in reversed(legs)]
    backward, _ = _travel(back, num_ranks, is_down=per_rank % 2 == 0, start=start)
    return [forward[s] for s in sorted(forward)], [backward[s] for s in sorted(backward)]


def _travel(
    legs: Sequence[range], num_ranks: int, *, is_down: bool, start: int
) -> tuple[dict[int, int], int]:
    """Travel the legs one after the other, each in slots that no other leg uses.

    On the way down a rank's slot is its number plus the slot in which the leg passes
    rank 0, on the way up that slot minus its number. Modulo an even period the two
    never meet if those slots are even for one direction and odd for the other.
    """
    period = len(legs)
    at_rank_0: set[tuple[bool, int]] = set()
    slots: dict[int, int] = {}
    parity = (start if is_down else start + num_ranks - 1) % 2
    for number, leg in enumerate(legs):
        goes_down = is_down == (number % 2 == 0)
        passing = start if goes_down else start + num_ranks - 1
        if period % 2 == 0:
            wanted = parity if goes_down == is_down else 1 - parity
            while passing % 2 != wanted or (goes_down, passing % period) in at_rank_0:
                start, passing = start + 1, passing + 1
            at_rank_0.add((goes_down, passing % period))
        slots |= {stage: start + step for step, stage in enumerate(leg)}
        start += num_ranks
    return slots, start


def overtaking(
    placement: Placement,
    num_microbatches: int,
    orders: Sequence[Sequence[Action]],
    *,
    limit: float = math.inf,
) -> list[list[Action]]:
    """Each rank's forwards and whole backwards in the order in which they are taken.

    Microbatches of one kind and stage keep their order. A forward takes one unit of time and
    a backward two.
    """
    numbering = Numbering(placement, Edges.chain(placement.num_stages), num_microbatches)
    play = _Overtaking(orders, numbering, limit, placement.num_stages)
    play.run()
    assert sum(map(len, play.ranks)) == sum(map(len, orders)), "ranks wait for each other"
    return play.ranks


class _Overtaking(Dispatch):
    """`_queues[rank]` holds a queue for each kind and stage, of `(place in the order, action)`."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], numbering: Numbering, limit: float, stages: int
    ) -> None:
        super().__init__(len(orders), numbering, unit_times(stages))
        self._limit, self._live = limit, [0] * len(orders)
        self._queues: list[list[deque[tuple[int, Action]]]] = []
        for order in orders:
            queues: dict[tuple[Kind, int], deque[tuple[int, Action]]] = {}
            for place, action in enumerate(order):
                queues.setdefault((action.kind, action.stage), deque()).append((place, action))
            self._queues.append(list(queues.values()))

    def choose(self, rank: int, now: float) -> Action | None:
        queues = self._queues[rank] = [queue for queue in self._queues[rank] if queue]
        ready, soonest = [], math.inf
        for queue in queues:
            action = queue[0][1]
            needed = self.numbering.reads_of(action)
            missing = [number for number in needed if self.ready[number] < 0]
            time = max((self.ready[number] for number in needed), default=0.0)
            if missing:
                self.wait(rank, missing[0])
            elif time <= now:
                ready.append(queue)
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
        forward = min((queue for queue in ready if queue[0][1].kind is Kind.FORWARD), default=None)
        backward = min((queue for queue in ready if queue[0][1].kind.is_backward), default=None)
        if forward is not None and self._live[rank] >= self._limit:
            very_next = min(queue[0][0] for queue in self._queues[rank])
            if forward[0][0] != very_next:
                forward = None
        if forward is None or backward is None:
            return forward or backward
        return min(forward, backward)
