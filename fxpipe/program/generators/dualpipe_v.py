"""DualPipe cut in half: a V on which forwards and backwards meet in pairs.

Rank r holds stages r and 2p - 1 - r. In the steady state a microbatch that goes
down the ranks meets the gradient that goes down, and the rank may work on both at
once (OVERLAP), for instance to compute one while the other waits for an exchange
between experts. On the way up the same can be done.

A pair hands on both results at its end. Pairs on the way down find their partners
in time. Pairs on the way up do not, quite: they let each gradient wait for a
forward on each rank. `dualpipe_v_down` pairs the way down only, which costs nothing, and
puts weight gradients where a rank would wait; `dualpipe_v` pairs both ways, with weight
gradients where they were published, which pays when a pair is quicker than its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import TWO, schedule
from fxpipe.program.play.fill import fill_weights
from fxpipe.program.program import Placement

__all__ = ["dualpipe_v", "dualpipe_v_down"]


@schedule(
    "DualPipeVDown", TWO, style="v", splits=True,
    what="DualPipeV with pairs on the way down the ranks only, at half the waiting.",
    when="As DualPipeV, when a pair is hardly quicker than its parts in turn.",
)  # fmt: skip
def dualpipe_v_down(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Overlap forwards and backwards on the way down; no waiting inside.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3I0 3F1 3I1 3W0 3W1 3F2 0I0 3I2 0I1 0W0 0I2 3W2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 (1F2;2B0)OVERLAP_F_B 2F2 1I0 2I1 1I1 2I2 1I2 1W0 2W1 1W1 2W2 1W2

    With p ranks and equal times of forward, input and weight gradient (a pair as
    long as its parts in turn), (p - 1) / (6 m + p - 1) of the time is idle from p
    microbatches on, and a rank waits only for its first input from 2 p - 1 on.
    Every rank holds at most p + 1/2 microbatches of its layers.
    """
    num_ranks = placement.num_ranks
    orders = []
    for rank in range(num_ranks):
        work = _Work(rank, num_ranks, num_microbatches)
        later = num_ranks - 1 - rank
        work.forwards(later, rank)
        for _ in range(later):
            work.do(work.up_input, work.up_forward)
        for _ in range(work.written - 2 * num_ranks + rank + 1):
            work.meet(work.down_forward, work.up_input, Kind.BACKWARD_INPUT)
            work.do(work.up_forward, work.down_input)
        for _ in range(later):
            work.do(work.up_input, work.up_forward, work.down_input)
        for _ in range(rank + 1):
            work.do(work.up_input, work.down_input)
        work.do(*[work.down_input] * later)
        orders.append(work.order)
    return fill_weights(placement, num_microbatches, orders, limit=2 * num_ranks + 1)


@schedule(
    "DualPipeV", TWO, "DualPipeVPaired", "DualPipeVFull", style="v", splits=True,
    what="A V with pairs of forward and backward down and up the ranks, as published.",
    when="Stages that wait for exchanges of their own, when a pair is clearly quicker.",
)  # fmt: skip
def dualpipe_v(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Overlap forwards and backwards both ways.

    Two ranks, four stages, four microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3

    With p ranks, m >= 2 p microbatches and equal times of forward, input and weight gradient,
    2 (p - 1) / (6 m + 2 (p - 1)) of the time is idle when a pair takes as long as
    its parts in turn; what a pair saves comes off the whole steady state.
    Every rank holds at most p + 1/2 microbatches of its layers. With fewer microbatches,
    for which it was not published, those that do not exist are left out of its order.
    """  # noqa: E501
    num_ranks = placement.num_ranks
    return [_published(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _published(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    work = _Work(rank, num_ranks, num_microbatches)
    later = num_ranks - 1 - rank
    # 1, 2 Forwards until the first microbatch has turned into a gradient here.
    work.forwards(later, rank)
    # 3 The gradient is here but has to go down and up: hold what comes in.
    for _ in range(later):
        work.do(work.up_input)
        work.weights(1)
        work.do(work.up_forward)
    # 4 Everything flows. The last rank has made its first forward this moment.
    for step in range(work.written - 2 * num_ranks + rank + 1):
        if step == 0 and later == 0:
            work.do(work.down_forward)
            work.whole(work.up_input)
        else:
            work.meet(work.down_forward, work.up_input, Kind.BACKWARD)
        work.meet(work.up_forward, work.down_input, Kind.BACKWARD)
    # 5 Nothing comes in any more; forwards go on up.
    for _ in range(later):
        work.whole(work.up_input)
        work.meet(work.up_forward, work.down_input, Kind.BACKWARD)
    # 6 Gradients go down and up; in the second half only what others wait for.
    for step in range(2 * (rank + 1)):
        inputs = work.down_input if step % 2 else work.up_input
        (work.do if step > rank else work.whole)(inputs)
    # 7, 8 The last ones have gone down and come up.
    for _ in range(later):
        work.weights(1)
        work.do(work.down_input)
    work.weights(work.written)
    return work.order


class _Work:
    """What a rank has to do, stage by stage, and the order in which it does it.

    It is written down for so many microbatches that each phase has its full length; leaving
    out microbatches that do not exist keeps an order valid.
    """

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self._exist = num_microbatches
        self.written = max(num_microbatches, 2 * num_ranks)
        down, up = rank, 2 * num_ranks - 1 - rank
        self.down_forward = self._all(Kind.FORWARD, down)
        self.up_forward = self._all(Kind.FORWARD, up)
        self.down_input = self._all(Kind.BACKWARD_INPUT, down)
        self.up_input = self._all(Kind.BACKWARD_INPUT, up)
        self.order: list[Action] = []
        self._left: list[Action] = []  # input gradients that wait for their weight half

    def _all(self, kind: Kind, stage: int) -> Iterator[Action]:
        return iter([Action(kind, stage, microbatch) for microbatch in range(self.written)])

    def forwards(self, later: int, rank: int) -> None:
        """Feed the stage on the way down until the first microbatch is back, then both."""
        self._add(*islice(self.down_forward, 2 * later))
        for _ in range(rank + 1):
            self.do(self.down_forward, self.up_forward)

    def do(self, *works: Iterator[Action]) -> None:
        """The next action of each."""
        for work in works:
            action = next(work)
            if action.kind is Kind.BACKWARD_INPUT:
                self._left.append(action)
            self._add(action)

    def whole(self, inputs: Iterator[Action]) -> None:
        """The next backward, both halves at once."""
        self._add(next(inputs)._replace(kind=Kind.BACKWARD))

    def weights(self, count: int) -> None:
        """The weight halves that have waited longest."""
        taken, self._left = self._left[:count], self._left[count:]
        self._add(*(action._replace(kind=Kind.BACKWARD_WEIGHT) for action in taken))

    def meet(self, forwards: Iterator[Action], inputs: Iterator[Action], alone: Kind) -> None:
        """A pair of the next two; where the forward does not exist, the backward as `alone`."""
        forward, given = next(forwards), next(inputs)
        if self._exists(forward):
            self.order.append(Action.overlap(forward, given._replace(kind=Kind.BACKWARD)))
        else:
            self._add(given._replace(kind=alone))

    def _add(self, *actions: Action) -> None:
        self.order += [action for action in actions if self._exists(action)]

    def _exists(self, action: Action) -> bool:
        return action.microbatch is not None and action.microbatch < self._exist
