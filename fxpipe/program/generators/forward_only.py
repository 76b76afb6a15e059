"""Forwards alone, for evaluation, on any placement of stages.

A rank always takes the microbatch that is deepest in the model, so microbatches
leave as soon as they can and few of them are under way.
"""

from __future__ import annotations

from heapq import heappop, heappush

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.sizes import ANY, check_sizes
from fxpipe.program.program import Placement, Program

__all__ = ["forward_only", "forward_only_on"]


def forward_only(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Run every forward and nothing else, with stages placed on a loop of ranks.

    Two ranks, four stages, three microbatches:

        rank 0: 0F0 0F1 2F0 2F1 0F2 2F2
        rank 1: 1F0 1F1 3F0 3F1 1F2 3F2

    Raises:
        ScheduleError: the stages do not spread evenly, or a count below one.
    """
    check_sizes("ForwardOnly", num_ranks, num_stages, num_microbatches, allowed=ANY)
    return forward_only_on(Placement.loop(num_ranks, num_stages), num_microbatches)


def forward_only_on(placement: Placement, num_microbatches: int) -> Program:
    """Run every forward and nothing else, with stages placed in any way.

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
    last = placement.num_stages - 1
    stage_to_rank = placement.stage_to_rank
    ranks: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    # What each rank could do now: the deepest stage first, then the oldest microbatch.
    ready: list[list[tuple[int, int]]] = [[] for _ in ranks]
    ready[stage_to_rank[0]] = [(0, m) for m in range(num_microbatches)]
    left = placement.num_stages * num_microbatches
    while left:
        done = []
        for rank, queue in enumerate(ready):
            if queue:
                depth, microbatch = heappop(queue)
                ranks[rank].append(Action(Kind.FORWARD, -depth, microbatch))
                done.append((-depth, microbatch))
        for stage, microbatch in done:
            if stage < last:
                heappush(ready[stage_to_rank[stage + 1]], (-stage - 1, microbatch))
        left -= len(done)
    return Program.of(placement, num_microbatches, ranks, name="ForwardOnly")
