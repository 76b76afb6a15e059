"""The zero-bubble schedule on a V: rank r holds stages r and 2p - 1 - r.

Down the ranks and up again, the last stage shares a rank with the first, so
gradients start where microbatches enter, and every rank holds the same memory
(Zero Bubble Pipeline Parallelism, schedule ZB-V).
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import TWO, schedule
from fxpipe.program.play.fill import fill_weights
from fxpipe.program.program import Placement

__all__ = ["zbv"]


@schedule(
    "ZBVZeroBubble", TWO, "ZBV", style="v", splits=True,
    what="Stages down the ranks and up again; no rank waits after it has started.",
    when="The least waiting at the memory of 1F1B, if F, I and W cost alike.",
)  # fmt: skip
def zbv(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """No waiting between a rank's first and last action, at the memory of 1F1B.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    With p ranks and equal times of forward, input and weight gradient, a rank waits
    only for its first input once there are 2 p - 1 microbatches; from p
    microbatches on, (p - 1) / (6 m + p - 1) of the whole time is idle. Every rank
    holds at most p microbatches of its layers.
    """
    num_ranks = placement.num_ranks
    orders = [_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return fill_weights(placement, num_microbatches, orders, limit=2 * num_ranks)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    # Written down for enough microbatches that each phase has its full length;
    # leaving out microbatches that do not exist keeps an order valid.
    written = max(num_microbatches, 2 * num_ranks - 1)
    down, up = rank, 2 * num_ranks - 1 - rank
    down_forward = [Action(Kind.FORWARD, down, m) for m in range(written)]
    up_forward = [Action(Kind.FORWARD, up, m) for m in range(written)]
    down_input = [Action(Kind.BACKWARD_INPUT, down, m) for m in range(written)]
    up_input = [Action(Kind.BACKWARD_INPUT, up, m) for m in range(written)]
    later = num_ranks - rank

    # 1 Forwards until the first microbatch has gone down and come up again.
    first = 2 * later - 1
    order = down_forward[:first]
    # 2 It goes on up: feed both stages until it has turned into a gradient.
    for pair in zip(up_forward[:rank], down_forward[first : first + rank], strict=True):
        order += pair
    # 3 The gradient is here but has to go down and up: hold what comes in.
    for pair in zip(up_forward[rank:num_ranks], up_input[:later], strict=True):
        order += pair
    # 4 One of each per microbatch, as long as there are some.
    for step in range(written):
        order += down_forward[first + rank + step : first + rank + step + 1]
        order += down_input[step : step + 1]
        order += up_forward[num_ranks + step : num_ranks + step + 1]
        order += up_input[later + step : later + step + 1]
    return [a for a in order if a.microbatch is not None and a.microbatch < num_microbatches]
