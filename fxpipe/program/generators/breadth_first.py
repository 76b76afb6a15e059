"""Schedules that finish all forwards before the first backward.

The simplest programs there are: every microbatch goes through a stage before
the next stage of the rank begins. All residuals live at once.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import ANY, ONE, schedule
from fxpipe.program.program import Placement

__all__ = ["gpipe", "looped_bfs"]


@schedule(
    "GPipe", ONE, "AFAB", "FillDrain",
    what="All forwards, then all backwards.",
    when="Few microbatches, or activations that are checkpointed; simplest to debug.",
)  # fmt: skip
def gpipe(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Run every forward, then every backward; one stage per rank.

    Two ranks, three microbatches:

        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2

    With p ranks and m microbatches, (p - 1) / (m + p - 1) of the time is idle and
    m residuals live at once.
    """
    return _breadth_first(placement, num_microbatches)


@schedule(
    "LoopedBFS", ANY, "BFS", "BreadthFirst",
    what="All microbatches through one stage of a rank before its next stage.",
    when="Sharded parameters, since each stage is gathered only twice a step.",
)  # fmt: skip
def looped_bfs(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Run all microbatches through a stage, then through the rank's next stage.

    Two ranks, four stages, two microbatches:

        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    With p ranks, m microbatches and v stages per rank, (p - 1) / (m v + p - 1) of
    the time is idle (for m >= p) and m microbatches of the rank's layers live at
    once. A stage's parameters are used in one stretch per direction, which suits
    sharded parameters: each is gathered twice a step.
    """
    return _breadth_first(placement, num_microbatches)


def _breadth_first(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    ranks = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        passes = [(Kind.FORWARD, s) for s in stages]
        passes += [(Kind.BACKWARD, s) for s in reversed(stages)]
        ranks.append([Action(k, s, m) for k, s in passes for m in range(num_microbatches)])
    return ranks
