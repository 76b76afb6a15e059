"""The report of a plan: its best options side by side, as HTML."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.cost.watch import PHASES
from fxpipe.planner.plan_text import summary_lines
from fxpipe.planner.search.option import Option

if TYPE_CHECKING:
    from fxpipe.planner.plan import Plan

__all__ = ["write_plan_report"]

_MOST_ACTIONS = 12_000


def write_plan_report(plan: Plan, path: str | os.PathLike[str], *, most: int) -> Path:
    """Write the report of a plan.

    Programs that are too long to look at are shown with fewer microbatches, and say so.
    """
    from fxpipe.viz.report import write_report

    fitting = [option for option in plan.options if not option.missing(plan.memory_limit)]
    shown = [_shortened(option) for option in fitting[:most]]
    names = [str(option.candidate) for option in shown]
    candidates = [
        (name, *option.timeline(plan.hardware)) for name, option in zip(names, shown, strict=True)
    ]
    notes = summary_lines(plan)
    notes.append(
        "Memory curves are of activations and transfers; weights, gradients and the "
        "optimizer come on top."
    )
    if shown[0].candidate != plan.best.candidate:
        count = plan.best.candidate.num_microbatches
        notes.append(f"Timelines are drawn with fewer than the {count} microbatches of the plan.")
    pipe, flops = _pipe_of(plan)
    return write_report(
        path,
        candidates,
        pipe=pipe,
        costs=plan.best.costs(plan.hardware),
        flops=flops,
        sizes=plan.sizes if pipe is not None else None,
        edges=plan.best.edges,
        title=f"Plan for {plan.num_ranks} ranks of {plan.hardware.name}",
        notes=notes,
        time_unit="s",
        memory_unit="bytes",
    )


def _shortened(option: Option) -> Option:
    """The option with so few microbatches that its program can be looked at."""
    candidate = option.candidate
    most = max(_MOST_ACTIONS // (2 * candidate.num_stages), 2 * candidate.pipeline)
    if candidate.num_microbatches <= most:
        return option
    return replace(option, candidate=replace(candidate, num_microbatches=most), program=None)


def _pipe_of(plan: Plan) -> tuple[Pipe | None, list[float] | None]:
    """The cut model and the FLOPs of its stages, if the plan still knows the model."""
    subject, best = plan.subject, plan.best
    if subject is None:
        return None, None
    stage_of = {name: stage for stage, names in enumerate(best.nodes) for name in names}
    pipe = subject.pipe or Pipe(subject.traced, Assignment(stage_of))
    sizes = {**subject.sizes, "batch": best.candidate.microbatch_size}
    flops = [0.0] * best.candidate.num_stages
    for name, seen in subject.costs.at(sizes).items():
        flops[stage_of[name]] += sum(seen.flops(phase) for phase in PHASES)
    return pipe, flops
