"""Schedules on a V that trade a little waiting for much less memory.

Rank r holds stages r and 2p - 1 - r. One microbatch does four things on a rank:
forward on the way down and on the way up, input gradient on the way down and on
the way up. Fix the slots in which the first microbatch does them, repeat every six
slots for the next ones, and fill in the weight gradients: since each rank's four
slots differ modulo six, nothing collides, whatever the number of microbatches
(Pipeline Parallelism with Controllable Memory). How long a microbatch's residuals
live, and so how many live at once, follows from the number of slots that a
microbatch spends per rank.

Slots of the first microbatch on rank r, p ranks, and the residues behind them:

    V-Half                              V-Min
    F down  r                           F down  r
    F up    3p - 2 - 2r                 F up    2p - 1 - r
    I down  3p - 1 + r                  I down  2p - 1 + c + r
    I up    6p - 4 + c - 2r             I up    4p - 2 + c - r
    c = 2 for odd p, 5 for even p       c = 3 if 3 divides p, else 1

The squeeze at both ends, where a rank has nothing else to do, comes for free: only
the order is kept. Idle shares below are for equal times of forward, input and
weight gradient.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import TWO, schedule
from fxpipe.program.play.fill import fill_weights
from fxpipe.program.program import Placement

__all__ = ["v_half", "v_min"]

_PERIOD = 6
# What a rank does to a microbatch: kind, and whether on the stage of the way up.
_BLOCK = (
    (Kind.FORWARD, False),
    (Kind.FORWARD, True),
    (Kind.BACKWARD_INPUT, True),
    (Kind.BACKWARD_INPUT, False),
)

Block = tuple[int, int, int, int]


@schedule(
    "VHalf", TWO, "VHalfMemory", style="v", splits=True,
    what="Half the memory of 1F1B at half its waiting, if F, I and W cost alike.",
    when="Activations that do not fit with ZBV.",
)  # fmt: skip
def v_half(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Half the memory of 1F1B at half its waiting.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 3F0 3I0 0F1 3W0 3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1: 1F0 2F0 2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 2F2 1I1 2W1 2I2 1I2 1W1 2W2 1W2

    With p ranks every rank holds at most (p + 2) // 2 microbatches of its layers.
    From 2 p microbatches on, (3 p - 4) / (6 m + 3 p - 4) of the time is idle for
    p > 2 (3 / (6 m + 3) for p = 2), against (6 p - 6) / (6 m + 6 p - 6) for 1F1B:
    p = 8, m = 32 measures 9.4 % against 17.9 %. Uneven times cost more: 19.9 % if an
    input gradient takes 1.4 and a weight gradient 0.6 forwards.
    """
    num_ranks = placement.num_ranks
    turn = 2 if num_ranks % 2 else 5
    blocks = [
        (
            rank,
            3 * num_ranks - 2 - 2 * rank,
            3 * num_ranks - 1 + rank,
            6 * num_ranks - 4 + turn - 2 * rank,
        )
        for rank in range(num_ranks)
    ]
    return _repeat(placement, blocks, num_microbatches, limit=num_ranks // 2 + 1)


@schedule(
    "VMin", TWO, "VMinMemory", style="v", splits=True,
    what="A third of the memory of 1F1B; waits less only if F, I and W cost alike.",
    when="Activations that do not fit with V-Half.",
)  # fmt: skip
def v_min(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """A third of the memory of 1F1B at less than its waiting.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
        rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    With p ranks every rank holds at most (p + 4) // 3 microbatches of its layers,
    the least that a V allows. From 2 p microbatches on, (4 p - 5 + c) / (6 m + 4 p - 5 + c)
    of the time is idle, c = 2 if 3 divides p and else 0, about two thirds of what
    1F1B waits: p = 8, m = 32 measures 12.3 % against 17.9 %. The price is paid when
    times are uneven: microbatches pass without a slot to spare, and 12.3 % become
    35.9 % if an input gradient takes 1.4 and a weight gradient 0.6 forwards.
    """
    num_ranks = placement.num_ranks
    turn = 1 if num_ranks % 3 else 3
    blocks = [
        (
            rank,
            2 * num_ranks - 1 - rank,
            2 * num_ranks - 1 + turn + rank,
            4 * num_ranks - 2 + turn - rank,
        )
        for rank in range(num_ranks)
    ]
    return _repeat(placement, blocks, num_microbatches, limit=(num_ranks + 4) // 3)


def _repeat(
    placement: Placement, blocks: list[Block], num_microbatches: int, *, limit: int
) -> list[list[Action]]:
    orders = []
    for rank, block in enumerate(blocks):
        assert len({slot % _PERIOD for slot in block}) == len(block)
        _, up = placement.stages_of(rank)
        slots = [
            (slot + _PERIOD * microbatch, Action(kind, up if is_up else rank, microbatch))
            for slot, (kind, is_up) in zip(block, _BLOCK, strict=True)
            for microbatch in range(num_microbatches)
        ]
        orders.append([action for _, action in sorted(slots)])
    return fill_weights(placement, num_microbatches, orders, limit=2 * limit)
