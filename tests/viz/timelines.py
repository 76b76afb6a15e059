"""Timelines that several tests draw."""

from fxpipe.program import Link, Program, StageCosts, Timeline, lower, simulate
from fxpipe.program.generators import SCHEDULES

__all__ = ["all_programs", "lowered_timeline", "program_of", "sharded_timeline", "timeline_of"]


def program_of(name: str, num_ranks: int = 4, num_microbatches: int = 8) -> Program:
    info = SCHEDULES[name]
    per_rank = max(info.stages_per_rank[0], 2 if info.allows(2) else 1)
    return info(num_ranks, per_rank * num_ranks, num_microbatches)


def timeline_of(name: str, num_ranks: int = 4, num_microbatches: int = 8) -> Timeline:
    return simulate(program_of(name, num_ranks, num_microbatches))


def all_programs() -> list[Program]:
    return [program_of(name) for name in SCHEDULES]


def lowered_timeline(name: str, **options: int) -> Timeline:
    """One whose transfers take time."""
    program = program_of(name)
    costs = StageCosts.uniform(program.placement, activation=1.0, link=Link(0.1, 5.0))
    return simulate(lower(program, **options), costs)


def sharded_timeline() -> Timeline:
    """One in which parameters are gathered and gradients reduced."""
    program = lower(program_of("LoopedBFS"), max_unsharded=1, reduce_grad=True)
    base = StageCosts.uniform(program.placement)
    stages = tuple(
        type(cost)(forward=1, unshard=0.5, reduce_grad=0.75, residual=1.0, parameters=2.0)
        for cost in base.stages
    )
    return simulate(program, StageCosts(stages))
