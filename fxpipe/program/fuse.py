"""Join the two halves of a backward where splitting it gains nothing.

In:  a compute-only program, complete (each I has its W).
Out: the same program with some pairs of I and W as one B.

A split backward sends the gradient for the stage before early and leaves the weight
gradient for a time when the rank would be idle. It costs a little itself, so it
should be there only where somebody gains from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fxpipe.program.action import Action, Edges, Kind
from fxpipe.program.play.walk import check_edges
from fxpipe.program.program import Program

__all__ = ["fuse_backward", "join_halves"]


def fuse_backward(
    program: Program, edges: Edges | None = None, *, keep_input_backward: Collection[int] = ()
) -> Program:
    """Join the halves of a backward where splitting it gains nothing.

    A stage to which no gradient-returning edge leads (usually the first) has nobody to
    send an early gradient to. Its I becomes nothing and its W the whole B, unless the
    stage is in `keep_input_backward` because a model input needs its gradient.

    Elsewhere I directly followed by W of the same stage and microbatch becomes B, if no
    gradient of I goes to another rank, which would have it later than before.
    """
    edges = check_edges(program, edges)
    rank_of = program.placement.stage_to_rank
    returns = [
        [edge.source for edge in edges.into(stage) if edge.has_gradient]
        for stage in range(program.num_stages)
    ]
    useless = {
        stage
        for stage in range(program.num_stages)
        if not returns[stage] and stage not in keep_input_backward
    }
    joinable = {
        stage
        for stage in range(program.num_stages)
        if all(rank_of[source] == rank_of[stage] for source in returns[stage])
    }
    ranks: list[Sequence[Action]] = []
    for rank, given in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        kept = given if useless.isdisjoint(stages) else _drop_useless(given, useless)
        ranks.append(kept if joinable.isdisjoint(stages) else join_halves(kept, joinable))
    return Program.of(program.placement, program.num_microbatches, ranks, name=program.name)


def _drop_useless(actions: Iterable[Action], stages: set[int]) -> list[Action]:
    kept: list[Action] = []
    for action in actions:
        if action.parts:
            parts = _drop_useless(action.parts, stages)
            kept += [Action.overlap(*parts)] if len(parts) == 2 else parts
        elif action.stage not in stages or action.kind in (Kind.FORWARD, Kind.BACKWARD):
            kept.append(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept.append(action._replace(kind=Kind.BACKWARD))
    return kept


def join_halves(actions: Iterable[Action], stages: set[int]) -> list[Action]:
    """One rank's actions with I and the W right behind it as one B, on these stages."""
    joined: list[Action] = []
    for action in actions:
        if (
            action.kind is Kind.BACKWARD_WEIGHT
            and joined
            and action.stage in stages
            and joined[-1] == action._replace(kind=Kind.BACKWARD_INPUT)
        ):
            joined[-1] = action._replace(kind=Kind.BACKWARD)
        else:
            joined.append(action)
    return joined
