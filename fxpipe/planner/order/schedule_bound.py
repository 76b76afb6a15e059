"""A time that no order of a program's actions can be below.

For each rank, three things cannot be had for less:

    wait until its first input can be there   + all its work
    and, if memory is short: forwards fill the time until its first backward can start
    only as far as memory holds them           + the rest of that time, idle
    its first input, its forwards and backwards + the way of the last gradient to the front

The first is "load and fill", the second grows with a tight memory limit, the third is the
drain. One microbatch's way through all stages is a bound as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.program import Action, Edges, Kind, Program, StageCosts, Value, reads, writes
from fxpipe.program.memory import kept_at_ends

__all__ = ["lower_bound"]


def lower_bound(
    program: Program, costs: StageCosts, edges: Edges, limits: Sequence[float] | None = None
) -> float:
    """A lower bound on the makespan of every order of the program's actions."""
    begins, tails = _ways(program, costs, edges)
    bound = 0.0
    if len({kind for kind, _ in begins}) < 4:  # else a microbatch goes one of two ways
        bound = max(begins[key] + costs.compute(*key) for key in begins)
    for rank, actions in enumerate(program.ranks):
        parts = [part for action in actions for part in action.each]
        main = [part for part in parts if part.kind is not Kind.BACKWARD_WEIGHT]
        pairs = [[(part.kind, part.stage) for part in a.parts] for a in actions if a.parts]
        saved = math.fsum(
            math.fsum(costs.compute(*part) for part in pair) - costs.pair(pair) for pair in pairs
        )
        head = min(begins[part.kind, part.stage] for part in parts) - saved
        # Whatever ends last of forwards and backwards is a backward of some stage of the rank.
        drain = min((tails[p.kind, p.stage] for p in main if p.kind.is_backward), default=0.0)
        fill, room = _work(parts, costs), math.inf if limits is None else limits[rank]
        first = min((begins[p.kind, p.stage] for p in main if p.kind.is_backward), default=0.0)
        if room < math.inf:
            stages = program.placement.stages_of(rank)
            fill += max(0.0, first - head - saved - _forwards_within(program, costs, stages, room))
        bound = max(bound, head + fill, head + _work(main, costs) + drain)
    return bound


def _forwards_within(
    program: Program, costs: StageCosts, stages: Sequence[int], room: float
) -> float:
    """The most time that a rank can spend on forwards before it must free memory."""
    kept = kept_at_ends(
        lambda kind, stage: costs.value_bytes(kind, stage, stage), program.num_stages
    )
    forwards = [Action(Kind.FORWARD, stage, 0) for stage in stages]
    times = [(costs.compute(a.kind, a.stage), max(kept(a)[0], 1e-300)) for a in forwards]
    filled, room = 0.0, room * (1 + 1e-9)
    # The most time per byte comes first, as in a knapsack that may be cut.
    for time, held in sorted(times, key=lambda each: each[0] / each[1], reverse=True):
        share = min(float(program.num_microbatches), room / held)
        filled += share * time
        room -= share * held
    return filled


def _work(parts: list[Action], costs: StageCosts) -> float:
    return math.fsum(costs.compute(part.kind, part.stage) for part in parts)


_Times = dict[tuple[Kind, int], float]


def _ways(program: Program, costs: StageCosts, edges: Edges) -> tuple[_Times, _Times]:
    """For each kind and stage the quickest way to its start, and from its end, if nobody else ran.

    Where a backward is whole in some microbatches and split in others, the quicker counts.
    """
    rank_of = program.placement.stage_to_rank
    kinds = {part.kind for acts in program.ranks for act in acts for part in act.each}
    stages = range(program.num_stages)
    backward = sorted(kind for kind in kinds if kind.is_backward)
    order = [(Kind.FORWARD, stage) for stage in stages]
    order += [(kind, stage) for stage in reversed(stages) for kind in backward]

    def travels(value: Value) -> float:
        ends = rank_of[value.stage], rank_of[value.peer]
        size = costs.value_bytes(value.kind, value.stage, value.peer)
        return 0.0 if ends[0] == ends[1] else costs.transfer(*ends, size)

    made: dict[Value, float] = {}
    begins: _Times = {}
    for kind, stage in order:
        action = Action(kind, stage, 0)
        begin = max((made[value] + travels(value) for value in reads(action, edges)), default=0.0)
        begins[kind, stage] = begin
        for value in writes(action, edges):
            made[value] = min(made.get(value, math.inf), begin + costs.compute(kind, stage))
    rest: dict[Value, float] = {}
    tails: _Times = {}
    for kind, stage in reversed(order):
        action = Action(kind, stage, 0)
        tail = max((rest.get(value, 0.0) for value in writes(action, edges)), default=0.0)
        tails[kind, stage] = tail
        for value in reads(action, edges):
            after = travels(value) + costs.compute(kind, stage) + tail
            rest[value] = min(rest.get(value, math.inf), after)
    return begins, tails
