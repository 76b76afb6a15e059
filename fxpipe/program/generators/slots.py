"""Place weight gradients where a rank would otherwise wait.

In:  for each rank the order of its forwards and input gradients, and how many
     residuals it may hold.
Out: the same order with every weight gradient put in.

Time is cut into slots in which each rank does one action, as if a forward, an
input gradient and a weight gradient of any stage cost the same and transfers
were free. Each rank follows its own order; it takes the oldest waiting weight
gradient instead when the next action's input is not there yet, or when the next
action is a forward and memory is full. So weight gradients fill holes, and no
rank ever holds more residuals than its limit, as long as its order alone (the
forwards minus the input gradients so far) does not need more.

The result is an order, not a timetable: it is right for any durations, and best
for equal ones. The work is linear in the number of actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fxpipe.program.action import Action, Kind
from fxpipe.program.program import Placement

__all__ = ["fill_weights"]

_NEVER = 1 << 60


def fill_weights(
    placement: Placement,
    num_microbatches: int,
    orders: Sequence[Sequence[Action]],
    limits: Sequence[int],
) -> list[list[Action]]:
    """Return each rank's order with a BACKWARD_WEIGHT for every BACKWARD_INPUT.

    `limits[rank]` bounds the residuals (microbatches of one stage) that the rank
    holds at a time, from their forward to the end of their weight gradient.
    """
    num_stages = placement.num_stages
    # The slot in which a stage did a microbatch. The row before the first stage
    # (index -1) and the row after the last one are the model's ends: always there.
    forward = [[_NEVER] * num_microbatches for _ in range(num_stages)]
    forward.append([-1] * num_microbatches)
    backward = [[_NEVER] * num_microbatches for _ in range(num_stages)]
    backward.append([-1] * num_microbatches)
    waiting: list[deque[Action]] = [deque() for _ in orders]
    filled: list[list[Action]] = [[] for _ in orders]
    position = [0] * len(orders)
    live = [0] * len(orders)
    unfinished = [rank for rank, order in enumerate(orders) if order]
    is_forward, weight = Kind.FORWARD, Kind.BACKWARD_WEIGHT

    now = 0
    while unfinished:
        progress = False
        for rank in unfinished:
            order, at = orders[rank], position[rank]
            if at < len(order):
                action = order[at]
                kind, stage, microbatch, _, _ = action
                assert microbatch is not None
                if kind is is_forward:
                    if forward[stage - 1][microbatch] < now and (
                        live[rank] < limits[rank] or not waiting[rank]
                    ):
                        forward[stage][microbatch] = now
                        live[rank] += 1
                        filled[rank].append(action)
                        position[rank] = at + 1
                        progress = True
                        continue
                elif forward[stage][microbatch] < now and backward[stage + 1][microbatch] < now:
                    backward[stage][microbatch] = now
                    waiting[rank].append(Action(weight, stage, microbatch))
                    filled[rank].append(action)
                    position[rank] = at + 1
                    progress = True
                    continue
            if waiting[rank]:
                filled[rank].append(waiting[rank].popleft())
                live[rank] -= 1
                progress = True
        assert progress, "the ranks' orders of forwards and input gradients wait for each other"
        now += 1
        unfinished = [r for r in unfinished if position[r] < len(orders[r]) or waiting[r]]
    return filled
