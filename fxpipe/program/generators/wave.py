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

At both ends the timetable has holes. `_squeeze` runs it as early as it goes and,
where a rank would wait, takes what is due next, within a bound on memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.sizes import SEVERAL, check_sizes
from fxpipe.program.program import Placement, Program

__all__ = ["wave"]


def wave(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
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

    Raises:
        ScheduleError: fewer than two stages per rank, stages that do not spread
            evenly, or a count below one.
    """
    per_rank = check_sizes("Wave", num_ranks, num_stages, num_microbatches, allowed=SEVERAL)
    placement = Placement.v(num_ranks, num_stages)
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
    ranks = _squeeze(placement, num_microbatches, orders, limit=limit)
    return Program.of(placement, num_microbatches, ranks, name="Wave")


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


@dataclass(slots=True)
class _Rank:
    order: Sequence[Action]
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    head: int = 0
    live: int = 0
    free_at: int = 0
    squeezed: list[Action] = field(default_factory=list)


def _squeeze(
    placement: Placement,
    num_microbatches: int,
    orders: Sequence[Sequence[Action]],
    *,
    limit: int,
) -> list[list[Action]]:
    """Run each rank's order as early as it goes, letting ready actions overtake.

    Of the ready actions a rank takes the one that comes first in its order; a forward
    only if that leaves at most `limit` residuals, or if it is the very next. So the
    action that is first in time is never held up, and no rank waits forever.
    A forward takes one unit of time and a backward two.
    """
    ranks = [_Rank(order) for order in orders]
    due = _positions(placement, num_microbatches, orders)
    last = placement.num_stages - 1
    # What becomes ready in the current unit of time and in the two after it.
    arriving: list[list[Action]] = [[], [], []]
    arriving[0] = [Action(Kind.FORWARD, 0, m) for m in range(num_microbatches)]
    left = sum(map(len, orders))
    now = 0
    while left:
        for kind, stage, microbatch, _, _ in arriving[now % 3]:
            assert microbatch is not None
            rank = ranks[placement.stage_to_rank[stage]]
            heap = rank.forwards if kind is Kind.FORWARD else rank.backwards
            heappush(heap, due[kind][stage][microbatch])
        arriving[now % 3] = []
        for rank in ranks:
            taken = _take(rank, limit) if rank.free_at <= now else None
            if taken is None:
                continue
            rank.free_at = now + (1 if taken.kind is Kind.FORWARD else 2)
            rank.squeezed.append(taken)
            left -= 1
            arriving[rank.free_at % 3] += _followers(taken, last)
        now += 1
    return [rank.squeezed for rank in ranks]


def _positions(
    placement: Placement, num_microbatches: int, orders: Sequence[Sequence[Action]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Where each action stands in the order of its rank: by kind, stage, microbatch."""
    forward = [[0] * num_microbatches for _ in range(placement.num_stages)]
    backward = [[0] * num_microbatches for _ in range(placement.num_stages)]
    due = (forward, backward)
    for order in orders:
        for at, (kind, stage, microbatch, _, _) in enumerate(order):
            assert microbatch is not None
            due[kind][stage][microbatch] = at
    return due


def _take(rank: _Rank, limit: int) -> Action | None:
    forwards, backwards = rank.forwards, rank.backwards
    may_forward = bool(forwards) and (rank.live < limit or forwards[0] == rank.head)
    if may_forward and (not backwards or forwards[0] < backwards[0]):
        at = heappop(forwards)
        rank.live += 1
    elif backwards:
        at = heappop(backwards)
        rank.live -= 1
    else:
        return None
    rank.done.add(at)
    while rank.head in rank.done:
        rank.done.discard(rank.head)
        rank.head += 1
    return rank.order[at]


def _followers(action: Action, last: int) -> tuple[Action, ...]:
    kind, stage, microbatch, _, _ = action
    if kind is Kind.FORWARD:
        if stage < last:
            return (Action(kind, stage + 1, microbatch),)
        return (Action(Kind.BACKWARD, stage, microbatch),)
    return (Action(kind, stage - 1, microbatch),) if stage else ()
