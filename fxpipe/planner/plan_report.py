"""A plan as a page, and what other machines would give as a table and a picture.

Who decides what to rent reads the page: what it takes, the options side by side, what each rank
holds, and timelines of the best.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.cost.observation import PHASES
from fxpipe.planner.plan_text import (
    cost_lines,
    cut_line,
    head_lines,
    other_rows,
    training_time,
)
from fxpipe.planner.search.option import Option
from fxpipe.text import bytes_text, number_text, seconds_text

if TYPE_CHECKING:
    from fxpipe.planner.plan import Plan

__all__ = ["draw_what_if", "what_if_rows", "write_plan_report"]

_MOST_ACTIONS = 12_000
"""Programs of more are drawn with fewer microbatches."""


def write_plan_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    most: int,
    tokens: float | None = None,
    price: float | None = None,
    what_if: Sequence[tuple[str, Plan | None]] = (),
) -> Path:
    """Write the report of a plan.

    Programs that are too long to look at are shown with fewer microbatches, and say so.
    """
    from fxpipe.viz.report import Table, write_report

    fitting = [option for option in plan.options if not option.missing(plan.memory_limit)]
    shown = [_shortened(option) for option in fitting[:most]]
    # Simulated as in the search, transfers beside compute, so that both have the same order.
    candidates = [
        (
            f"{option.candidate}: a step of {seconds_text(option.step_time)}",
            *drawn.timeline(plan.hardware, transfers=False),
        )
        for option, drawn in zip(fitting, shown, strict=False)
    ]
    costs = [] if tokens is None else cost_lines(plan, tokens, price)
    notes = [*costs, *head_lines(plan), cut_line(plan)]
    memory = "Of each rank at its fullest moment, and what is left of its memory."
    tables = [
        Table("Options", "From the quickest on.", other_rows(plan, 14), ("option", "")),
        Table("Memory", memory, _memory_rows(plan)),
    ]
    if what_if:
        rows = what_if_rows(what_if, tokens, price)
        tables.append(Table("What if", "Planned again for each.", rows, ("what if", "option")))
    drawn = "Memory curves are of activations and transfers; the rest comes on top."
    if shown[0].candidate != plan.best.candidate:
        drawn += (
            f" Drawn with fewer microbatches than the {plan.best.candidate.num_microbatches} of "
            "the plan, so times and shares here are not the plan's: compare options above."
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
        tables=tables,
        drawn=drawn,
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
    pipe = subject.pipe or Pipe(subject.uncut(), Assignment(stage_of))
    sizes = {**subject.sizes, "batch": best.candidate.microbatch_size}
    flops = [0.0] * best.candidate.num_stages
    for name, seen in subject.costs.at(sizes).items():
        flops[stage_of[name]] += sum(seen.flops(phase) for phase in PHASES)
    return pipe, flops


def draw_what_if(rows: Sequence[tuple[str, Plan | None]], path: str | os.PathLike[str]) -> Path:
    """Draw `what_if` as bars: tokens per second and rank, or rows without a sequence."""
    from fxpipe.viz.palette import LIGHT
    from fxpipe.viz.scene import Box, Item, Label, Scene
    from fxpipe.viz.svg import write_scene

    look, left, widest = LIGHT, 270.0, 380.0
    # Of rows of another length more or fewer would say nothing.
    has_tokens = all(plan is None or plan.tokens_per_second for _, plan in rows)
    rates = [0.0 if plan is None else _rate(plan, has_tokens) for _, plan in rows]
    items: list[Item] = [
        Label(
            20,
            30,
            f"{'Tokens' if has_tokens else 'Rows'} per second and rank, if",
            15,
            look.ink,
            bold=True,
        ),
    ]
    for place, ((label, plan), rate) in enumerate(zip(rows, rates, strict=True)):
        y = 50.0 + 34 * place
        width = widest * rate / (max(rates) or 1.0)
        said = "nothing fits"
        if plan is not None:
            much = f"{rate:,.0f}" if rate >= 1000 else number_text(rate)
            said = f"{much}, a step of {seconds_text(plan.step_time)}"
        items += [
            Label(left - 10, y + 16, label, 12, look.ink, anchor="end"),
            Box(left, y, width, 22, look.bar, tip="" if plan is None else str(plan.best.candidate)),
            Label(left + width + 8, y + 16, said, 12, look.muted),
        ]
    target = Path(path)
    size = (left + widest + 230, 60.0 + 34 * len(rows))
    write_scene(Scene(*size, tuple(items), "what if"), target)
    return target


def _memory_rows(plan: Plan) -> list[tuple[str, ...]]:
    """What each rank holds, part by part."""
    every = [(memory, asdict(memory)) for memory in plan.best.prediction.memory]
    rows: list[tuple[str, ...]] = [("rank", "holds", "free", *every[0][1])]
    for rank, (memory, parts) in enumerate(every):
        sizes = [memory.total, plan.memory_limit - memory.total, *parts.values()]
        rows.append((str(rank), *map(bytes_text, sizes)))
    return rows


def what_if_rows(
    rows: Sequence[tuple[str, Plan | None]],
    tokens: float | None = None,
    price: float | None = None,
) -> list[tuple[str, ...]]:
    """A table of plans with one thing changed; with `tokens` and `price` of what these take."""
    table: list[tuple[str, ...]] = [
        ("what if", "step", "tokens/s/rank", "MFU", "days", "dollars", "option")
    ]
    for label, found in rows:
        if found is None:
            table.append((label, *["-"] * 5, "nothing fits"))
            continue
        rate = found.tokens_per_second
        days, hours = ("-", 0.0) if tokens is None or not rate else training_time(found, tokens)
        table.append(
            (
                label,
                seconds_text(found.step_time),
                "-" if rate is None else f"{rate:,.0f}",
                f"{found.utilization:.1%}",
                days,
                "-" if price is None or not hours else f"${hours * price:,.0f}",
                str(found.best.candidate),
            )
        )
    known = [i for i in range(7) if i not in (4, 5) or any(row[i] != "-" for row in table[1:])]
    return [tuple(row[i] for i in known) for row in table]


def _rate(plan: Plan, has_tokens: bool) -> float:
    return (plan.tokens_per_second or 0.0) if has_tokens else plan.throughput / plan.num_ranks
