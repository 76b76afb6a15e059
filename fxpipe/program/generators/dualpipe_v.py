"""DualPipe cut in half: a V on which forwards and backwards meet in pairs.

Rank r holds stages r and 2p - 1 - r. In the steady state a microbatch that goes
down the ranks meets the gradient that goes down, and the rank may work on both at
once (OVERLAP), for instance to compute one while the other waits for an exchange
between experts. On the way up the same can be done.

A pair hands on both results at its end. Pairs on the way down find their partners
in time. Pairs on the way up do not, quite: they let each gradient wait for a
forward on each rank. `dualpipe_v_down` pairs the way down only, which costs nothing;
`dualpipe_v` pairs both ways, as first published, which pays when a pair is
quicker than its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.sizes import TWO, check_sizes
from fxpipe.program.generators.slots import fill_weights
from fxpipe.program.program import Placement, Program

__all__ = ["dualpipe_v", "dualpipe_v_down"]


def dualpipe_v_down(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Overlap forwards and backwards on the way down; no waiting inside.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3I0 3F1 3I1 3W0 3W1 3F2 0I0 3I2 0I1 0W0 0I2 3W2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 (1F2;2B0)OVERLAP_F_B 2F2 1I0 2I1 1I1 2I2 1I2 1W0 2W1 1W1 2W2 1W2

    With p ranks and equal times of forward, input and weight gradient (a pair as
    long as its parts in turn), (p - 1) / (6 m + p - 1) of the time is idle from p
    microbatches on, and a rank waits only for its first input from 2 p - 1 on.
    Every rank holds at most p + 1/2 microbatches of its layers.

    Raises:
        ScheduleError: not two stages per rank, or a count below one.
    """
    check_sizes("DualPipeVDown", num_ranks, num_stages, num_microbatches, allowed=TWO)
    return _program(num_ranks, num_microbatches, pairs_up=False, name="DualPipeVDown")


def dualpipe_v(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Overlap forwards and backwards both ways.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3I0 3F1 3I1 3W0 3W1 (3F2;0B0)OVERLAP_F_B 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 (1F2;2B0)OVERLAP_F_B (2F2;1B0)OVERLAP_F_B 2I1 1I1 2W1 1W1 2I2 1I2 2W2 1W2

    With p ranks and equal times of forward, input and weight gradient,
    2 (p - 1) / (6 m + 2 (p - 1)) of the time is idle when a pair takes as long as
    its parts in turn; what a pair saves comes off the whole steady state.
    Every rank holds at most p + 1/2 microbatches of its layers.

    Raises:
        ScheduleError: not two stages per rank, or a count below one.
    """  # noqa: E501
    check_sizes("DualPipeV", num_ranks, num_stages, num_microbatches, allowed=TWO)
    return _program(num_ranks, num_microbatches, pairs_up=True, name="DualPipeV")


def _program(num_ranks: int, num_microbatches: int, *, pairs_up: bool, name: str) -> Program:
    placement = Placement.v(num_ranks, 2 * num_ranks)
    orders = [
        _order(rank, num_ranks, num_microbatches, pairs_up=pairs_up) for rank in range(num_ranks)
    ]
    ranks = fill_weights(placement, num_microbatches, orders, limit=2 * num_ranks + 1)
    return Program.of(placement, num_microbatches, ranks, name=name)


def _order(rank: int, num_ranks: int, num_microbatches: int, *, pairs_up: bool) -> list[Action]:
    # Written down for enough microbatches that each phase has its full length;
    # leaving out microbatches that do not exist keeps an order valid.
    written = max(num_microbatches, 2 * num_ranks)
    later = num_ranks - 1 - rank
    down, up = rank, 2 * num_ranks - 1 - rank
    down_forward = _microbatches(Kind.FORWARD, down, written)
    up_forward = _microbatches(Kind.FORWARD, up, written)
    down_input = _microbatches(Kind.BACKWARD_INPUT, down, written)
    up_input = _microbatches(Kind.BACKWARD_INPUT, up, written)
    order: list[Action] = []

    def meet(forward: Action, backward: Action, *, overlap: bool) -> None:
        both_exist = _exists(forward, num_microbatches) and _exists(backward, num_microbatches)
        if overlap and both_exist:
            order.append(_pair(forward, backward))
        else:
            order.extend((forward, backward))

    # 1 Forwards until the first microbatch has gone down and come up again.
    order += islice(down_forward, 2 * later)
    # 2 It goes on up: feed both stages until it has turned into a gradient.
    for _ in range(rank + 1):
        order += (next(down_forward), next(up_forward))
    # 3 The gradient is here but has to go down and up: hold what comes in.
    for _ in range(later):
        order += (next(up_input), next(up_forward))
    # 4 Everything flows.
    for _ in range(written - 2 * num_ranks + rank + 1):
        meet(next(down_forward), next(up_input), overlap=True)
        meet(next(up_forward), next(down_input), overlap=pairs_up)
    # 5 Nothing comes in any more; forwards go on up.
    for _ in range(later):
        order.append(next(up_input))
        meet(next(up_forward), next(down_input), overlap=pairs_up)
    # 6 Gradients go down and up.
    for _ in range(rank + 1):
        order += (next(up_input), next(down_input))
    # 7 The last ones have gone down and come up.
    order += down_input
    return [a for a in order if _exists(a, num_microbatches)]


def _microbatches(kind: Kind, stage: int, count: int) -> Iterator[Action]:
    return iter([Action(kind, stage, microbatch) for microbatch in range(count)])


def _exists(action: Action, num_microbatches: int) -> bool:
    return action.microbatch is not None and action.microbatch < num_microbatches


def _pair(forward: Action, backward: Action) -> Action:
    whole = backward._replace(kind=Kind.BACKWARD)
    return Action(Kind.OVERLAP, forward.stage, forward.microbatch, parts=(forward, whole))
