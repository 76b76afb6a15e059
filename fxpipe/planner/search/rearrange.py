"""Give an option a better order of actions than its schedule's, if there is one."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.order.improve import improve
from fxpipe.planner.search.estimate import predict
from fxpipe.planner.search.option import Option

__all__ = ["rearranged"]


def rearranged(option: Option, hardware: Hardware, memory_limit: float) -> Option:
    """The option with an improved program, or as it was if none is quicker and fits."""
    found = improve(option.make_program(), option.costs(hardware), edges=option.edges)
    prediction = predict(
        found.program,
        option.stages,
        option.edge_bytes,
        hardware,
        option.candidate.layout,
    )
    if prediction.step_time >= option.step_time or prediction.peak > memory_limit:
        return option
    return replace(option, prediction=prediction, program=found.program)
