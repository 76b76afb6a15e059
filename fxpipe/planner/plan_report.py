"""Pictures of plans: the best options side by side as HTML, and what changes would do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.cost.observation import PHASES
from fxpipe.planner.plan_text import summary_lines
from fxpipe.planner.search.option import Option
from fxpipe.text import number_text, seconds_text

if TYPE_CHECKING:
    from fxpipe.planner.plan import Plan

__all__ = ["draw_what_if", "write_plan_report"]

_MOST_ACTIONS = 12_000


def write_plan_report(plan: Plan, path: str | os.PathLike[str], *, most: int) -> Path:
    """Write the report of a plan.

    Programs that are too long to look at are shown with fewer microbatches, and say so.
    """
    from fxpipe.viz.report import write_report

    fitting = [option for option in plan.options if not option.missing(plan.memory_limit)]
    shown = [_shortened(option) for option in fitting[:most]]
    # Simulated as in the search, transfers beside compute, so that both have the same order.
    candidates = [
        (
            f"{drawn.candidate}: a step of {seconds_text(option.step_time)}",
            *drawn.timeline(plan.hardware, transfers=False),
        )
        for option, drawn in zip(fitting, shown, strict=False)
    ]
    notes = summary_lines(plan)
    notes.append(
        "Memory curves are of activations and transfers; weights, gradients and the "
        "optimizer come on top."
    )
    if shown[0].candidate != plan.best.candidate:
        count = plan.best.candidate.num_microbatches
        notes.append(
            f"Timelines are drawn with fewer than the {count} microbatches of the plan, which has "
            "the time that stands with each name."
        )
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


def draw_what_if(rows: Sequence[tuple[str, Plan | None]], path: str | os.PathLike[str]) -> Path:
    """Draw `what_if`: how many rows per second and rank each change makes, as bars."""
    from fxpipe.viz.palette import LIGHT
    from fxpipe.viz.scene import Box, Item, Label, Scene
    from fxpipe.viz.svg import write_scene

    look, left, widest = LIGHT, 270.0, 380.0
    rates = [0.0 if plan is None else plan.throughput / plan.num_ranks for _, plan in rows]
    items: list[Item] = [
        Label(20, 30, "Rows per second and rank, if", 15, look.ink, bold=True),
    ]
    for place, ((label, plan), rate) in enumerate(zip(rows, rates, strict=True)):
        y = 50.0 + 34 * place
        width = widest * rate / (max(rates) or 1.0)
        said = "nothing fits"
        if plan is not None:
            said = f"{number_text(rate)}, a step of {seconds_text(plan.step_time)}"
        items += [
            Label(left - 10, y + 16, label, 12, look.ink, anchor="end"),
            Box(left, y, width, 22, look.bar, tip="" if plan is None else str(plan.best.candidate)),
            Label(left + width + 8, y + 16, said, 12, look.muted),
        ]
    target = Path(path)
    size = (left + widest + 230, 60.0 + 34 * len(rows))
    write_scene(Scene(*size, tuple(items), "what if"), target)
    return target
