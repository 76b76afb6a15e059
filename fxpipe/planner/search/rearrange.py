"""Give an option a better order of actions than its schedule's, if there is one."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.order.improve import improve
from fxpipe.planner.order.orders import Objective
from fxpipe.planner.search.estimate import predict
from fxpipe.planner.search.option import Option

__all__ = ["rearranged"]


def rearranged(
    option: Option,
    hardware: Hardware,
    memory_limit: float,
    objective: Objective = "step",
    *,
    budget: int = 2_000_000,
) -> Option:
    """The option with an improved program, or as it was if none is quicker and fits.

    A better order may hold as much more as the rank has free.
    """
    if option.candidate.offload:
        return option  # another order is another time for copies, which the search does not see
    program, costs = option.make_program(), option.costs(hardware)
    _, timeline = option.timeline(hardware, transfers=False)
    free = [(memory_limit - m.total) / (1 + hardware.reserve) for m in option.prediction.memory]
    room = [held + max(more, 0.0) for held, more in zip(timeline.peak_memory, free, strict=True)]
    found = improve(program, costs, room, edges=option.edges, objective=objective, budget=budget)
    prediction = predict(
        found.program,
        option.stages,
        option.edge_bytes,
        hardware,
        option.candidate.layout,
        objective,
    )
    if prediction.step_time >= option.step_time or prediction.peak > memory_limit:
        return option
    return replace(option, prediction=prediction, program=found.program)
