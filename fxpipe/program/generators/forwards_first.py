"""Schedules that finish all forwards before the first backward, or have no backward.

The simplest programs there are: every microbatch goes through a stage before the next stage
of the rank begins, and all residuals live at once.

Forwards alone run on any placement of stages. On a loop of ranks microbatches go through a
rank's stages in rounds, as in interleaved 1F1B. On any other placement a rank takes the ready
microbatch that is deepest in the model, so that microbatches leave as soon as they can.
"""

from __future__ import annotations

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import ANY, ONE, schedule
from fxpipe.program.generators.one_f_one_b import round_sizes
from fxpipe.program.generators.wave import overtaking
from fxpipe.program.program import Placement, Program

__all__ = ["forward_only", "forward_only_on", "gpipe", "looped_bfs"]


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


@schedule(
    "ForwardOnly", ANY, "Inference", "Eval", trains=False,
    what="Forwards alone, on any placement of stages.",
    when="Evaluation and inference.",
)  # fmt: skip
def forward_only(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Run every forward and nothing else, with stages placed on a loop of ranks.

    Two ranks, four stages, five microbatches:

        rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4
        rank 1: 1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4

    With p ranks, m >= p microbatches and v stages per rank, (p - 1) / (m v + p - 1) of
    the time is idle, the least that a pipeline can wait.
    """
    return _in_rounds(placement, num_microbatches)


def forward_only_on(placement: Placement, num_microbatches: int, *, rounds: int = 1) -> Program:
    """Run every forward and nothing else, with stages placed in any way.

    The stages may be those of several rounds through one pipeline: no microbatch then runs far
    ahead of the others, so that with a microbatch for each rank all have work in every round.

    On a V of two ranks, three microbatches:

        rank 0: 0F0 0F1 0F2 3F0 3F1 3F2
        rank 1: 1F0 2F0 1F1 2F1 1F2 2F2

    Raises:
        ScheduleError: there is no microbatch.
    """
    if num_microbatches < 1:
        raise ScheduleError(
            f"ForwardOnly needs at least 1 microbatch, got num_microbatches={num_microbatches}"
        )
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    is_loop = num_stages % num_ranks == 0 and placement == Placement.loop(num_ranks, num_stages)
    if is_loop:
        ranks = _in_rounds(placement, num_microbatches)
    else:
        ranks = _deepest_first(placement, num_microbatches, num_stages // rounds)
    return Program.of(placement, num_microbatches, ranks, name="ForwardOnly")


def _in_rounds(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    ranks: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    start = 0
    for size in round_sizes(placement.num_ranks, num_microbatches):
        for stage, rank in enumerate(placement.stage_to_rank):
            ranks[rank] += [Action(Kind.FORWARD, stage, start + step) for step in range(size)]
        start += size
    return ranks


def _deepest_first(
    placement: Placement, num_microbatches: int, round_stages: int
) -> list[list[Action]]:
    orders = [
        [
            Action(Kind.FORWARD, stage, microbatch)
            for stage in sorted(
                placement.stages_of(rank), key=lambda stage: (stage // round_stages, -stage)
            )
            for microbatch in range(num_microbatches)
        ]
        for rank in range(placement.num_ranks)
    ]
    return overtaking(placement, num_microbatches, orders)
