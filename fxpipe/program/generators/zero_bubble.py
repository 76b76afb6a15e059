"""Zero-bubble schedules, on a loop of ranks and on a V.

A backward has two halves: the input gradient, for which the rank before waits,
and the weight gradient, for which nobody does. These schedules run the first
as early as 1F1B runs a backward, and use the second to fill the holes (Zero
Bubble Pipeline Parallelism, schedules ZB-H1, ZB-H2, the interleaved ZB1P and ZB-V).

On the V of `zbv` rank r holds stages r and 2p - 1 - r: down the ranks and up again, the
last stage shares a rank with the first, so gradients start where microbatches enter, and
every rank holds the same memory.

Idle shares below are for equal times of forward, input and weight gradient.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import ANY, ONE, TWO, schedule
from fxpipe.program.generators.one_f_one_b import interleaved_orders, round_sizes
from fxpipe.program.play.fill import fill_weights
from fxpipe.program.program import Placement

__all__ = ["interleaved_zero_bubble", "zb_h1", "zb_h2", "zbv"]


@schedule(
    "ZBH1", ONE, "ZeroBubbleH1", splits=True,
    what="1F1B with weight gradients in the holes: a third of the waiting.",
    when="One stage per rank and the memory of 1F1B.",
)  # fmt: skip
def zb_h1(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """1F1B with weight gradients in the holes, at the memory of 1F1B.

    Three ranks, four microbatches:

        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    With p ranks and m >= p microbatches, (p - 1) / (3 m + p - 1) of the time is
    idle, a third of what 1F1B waits. Every rank holds at most p residuals.
    """
    return _one_period(placement, num_microbatches)


@schedule(
    "InterleavedZeroBubble", ANY, "ZB1P", "InterleavedZB", splits=True,
    what="Interleaved 1F1B with weight gradients in the holes, at the memory of 1F1B.",
    when="Several stages per rank and little waiting at the memory of 1F1B.",
)  # fmt: skip
def interleaved_zero_bubble(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Interleaved 1F1B with weight gradients in the holes (ZB1P).

    Two ranks, four stages, two microbatches:

        rank 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 0I0 0I1 2W1 0W0 0W1
        rank 1: 1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1

    With p ranks, m >= p microbatches and v stages per rank, (p - 1) / (3 m v + p - 1)
    of the time is idle. When m is a multiple of p every rank holds at most p
    microbatches of its layers; otherwise the rounds of microbatches are longer
    than p (but shorter than 2 p), and so is what a rank holds for its stages but
    one. With one stage per rank it is ZB-H1.
    """
    return _one_period(placement, num_microbatches)


@schedule(
    "ZBH2", ONE, "ZeroBubbleH2", "ZB2P", splits=True,
    what="A warm-up twice as long, so that no rank waits once it has started.",
    when="One stage per rank and twice the memory of 1F1B to spare.",
)  # fmt: skip
def zb_h2(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """No waiting between a rank's first and last action, at twice the memory.

    Two ranks, four microbatches:

        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0I2 0W1 0W2 0I3 0W3
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    The warm-up is twice as long as that of ZB-H1: forwards fill the time in which
    the first gradient comes back. With p ranks and m >= 2 p - 1 microbatches a
    rank waits only for its first input; the last rank so ends p - 1 slots later
    than the first. Every rank holds at most 2 p - 1 residuals.
    """
    orders = interleaved_orders(placement, num_microbatches, Kind.BACKWARD_INPUT, ahead=2)
    return fill_weights(placement, num_microbatches, orders, limit=2 * placement.num_ranks - 1)


def _one_period(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    orders = interleaved_orders(placement, num_microbatches, Kind.BACKWARD_INPUT, ahead=1)
    # What rank 0 holds when it starts to alternate, allowed to all: the later ranks,
    # which start with fewer forwards, use the rest to put weight gradients off.
    num_ranks = placement.num_ranks
    longest_round = max(num_ranks, round_sizes(num_ranks, num_microbatches)[0])
    limit = (placement.num_stages // num_ranks - 1) * longest_round + num_ranks
    return fill_weights(placement, num_microbatches, orders, limit=limit)


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
    orders = [_zbv_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return fill_weights(placement, num_microbatches, orders, limit=2 * num_ranks)


def _zbv_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
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
