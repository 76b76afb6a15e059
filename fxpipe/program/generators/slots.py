"""Place weight gradients where a rank would otherwise wait.

In:  for each rank the order of its forwards and input gradients, and how many
     residuals it may hold. A pair of a forward and a whole backward (OVERLAP)
     counts as both.
Out: the same order with a weight gradient put in for every input gradient.

Time is cut into slots in which each rank does one action (a pair takes three),
as if a forward, an input gradient and a weight gradient of any stage cost the
same and transfers were free. Each rank follows its own order; it takes the oldest
waiting weight gradient instead when the next action's input is not there yet, or
when the next action is a forward and memory is full. So weight gradients fill
holes, and no rank holds more residuals than its limit, as long as its order alone
(the forwards minus the backwards so far) does not need more.

The result is an order, not a timetable: it is right for any durations, and best
for equal ones. The work is linear in the number of actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxpipe.program.action import Action, Kind
from fxpipe.program.program import Placement

__all__ = ["fill_weights"]

_NEVER = 1 << 60
_PAIR_SLOTS = 3
_FORWARD, _OVERLAP, _WEIGHT = Kind.FORWARD, Kind.OVERLAP, Kind.BACKWARD_WEIGHT

Table = list[list[int]]


def fill_weights(
    placement: Placement,
    num_microbatches: int,
    orders: Sequence[Sequence[Action]],
    *,
    limit: int,
) -> list[list[Action]]:
    """Return each rank's order with a BACKWARD_WEIGHT for every BACKWARD_INPUT.

    `limit` bounds the residuals (microbatches of one stage) that a rank holds at
    a time, from their forward to the end of their weight gradient.
    """
    # The slot from which a stage's activation or gradient of a microbatch is there.
    # The extra row stands for the model's ends, which nobody waits for: it is the
    # activation before stage 0 (index -1) and the gradient after the last stage.
    activation = [[_NEVER] * num_microbatches for _ in range(placement.num_stages)]
    activation.append([0] * num_microbatches)
    gradient = [list(row) for row in activation]
    ranks = [_Rank(order) for order in orders]
    unfinished = [rank for rank in ranks if rank.order]
    now = 0
    while unfinished:
        progress = False
        for rank in unfinished:
            if rank.free_at <= now:
                rank.free_at = now + _advance(rank, now, activation, gradient, limit)
            progress = progress or rank.free_at > now
        assert progress, "the orders of forwards and backwards wait for each other"
        now += 1
        unfinished = [r for r in unfinished if r.position < len(r.order) or r.waiting]
    return [rank.filled for rank in ranks]


@dataclass(slots=True)
class _Rank:
    order: Sequence[Action]
    position: int = 0
    live: int = 0
    free_at: int = 0
    waiting: deque[Action] = field(default_factory=deque)
    filled: list[Action] = field(default_factory=list)


def _advance(rank: _Rank, now: int, activation: Table, gradient: Table, limit: int) -> int:
    """Do the rank's next action or a weight gradient; return the slots it takes, or 0."""
    if rank.position < len(rank.order):
        action = rank.order[rank.position]
        kind, stage, microbatch, _, parts = action
        assert microbatch is not None
        took = 0
        if kind is _FORWARD:
            has_room = rank.live < limit or not rank.waiting
            if has_room and activation[stage - 1][microbatch] <= now:
                activation[stage][microbatch] = now + 1
                rank.live += 1
                took = 1
        elif kind is _OVERLAP:
            has_room = rank.live < limit or not rank.waiting
            if has_room and _start_pair(parts, now, activation, gradient):
                took = _PAIR_SLOTS
        elif activation[stage][microbatch] <= now and gradient[stage + 1][microbatch] <= now:
            gradient[stage][microbatch] = now + 1
            rank.waiting.append(Action(_WEIGHT, stage, microbatch))
            took = 1
        if took:
            rank.filled.append(action)
            rank.position += 1
            return took
    if not rank.waiting:
        return 0
    rank.filled.append(rank.waiting.popleft())
    rank.live -= 1
    return 1


def _start_pair(parts: Sequence[Action], now: int, activation: Table, gradient: Table) -> bool:
    forward, backward = parts
    came, gone = forward.microbatch, backward.microbatch
    assert came is not None and gone is not None
    if (
        activation[forward.stage - 1][came] > now
        or activation[backward.stage][gone] > now
        or gradient[backward.stage + 1][gone] > now
    ):
        return False
    activation[forward.stage][came] = now + _PAIR_SLOTS
    gradient[backward.stage][gone] = now + _PAIR_SLOTS
    return True
