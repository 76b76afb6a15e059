"""Schedules that finish all forwards before the first backward.

The simplest programs there are: every microbatch goes through a stage before
the next stage of the rank begins. All residuals live at once.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.sizes import ANY, ONE, check_sizes
from fxpipe.program.program import Placement, Program

__all__ = ["gpipe", "looped_bfs"]


def gpipe(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Run every forward, then every backward; one stage per rank.

    Two ranks, three microbatches:

        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2

    With p ranks and m microbatches, (p - 1) / (m + p - 1) of the time is idle and
    m residuals live at once.

    Raises:
        ScheduleError: not one stage per rank, or a count below one.
    """
    check_sizes("GPipe", num_ranks, num_stages, num_microbatches, allowed=ONE)
    return _breadth_first(num_ranks, num_stages, num_microbatches, "GPipe")


def looped_bfs(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Run all microbatches through a stage, then through the rank's next stage.

    Two ranks, four stages, two microbatches:

        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    With p ranks, m microbatches and v stages per rank, (p - 1) / (m v + p - 1) of
    the time is idle (for m >= p) and m microbatches of the rank's layers live at
    once. A stage's parameters are used in one stretch per direction, which suits
    sharded parameters: each is gathered twice a step.

    Raises:
        ScheduleError: the stages do not spread evenly, or a count below one.
    """
    check_sizes("LoopedBFS", num_ranks, num_stages, num_microbatches, allowed=ANY)
    return _breadth_first(num_ranks, num_stages, num_microbatches, "LoopedBFS")


def _breadth_first(num_ranks: int, num_stages: int, num_microbatches: int, name: str) -> Program:
    placement = Placement.loop(num_ranks, num_stages)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        passes = [(Kind.FORWARD, s) for s in stages]
        passes += [(Kind.BACKWARD, s) for s in reversed(stages)]
        ranks.append([Action(k, s, m) for k, s in passes for m in range(num_microbatches)])
    return Program.of(placement, num_microbatches, ranks, name=name)
