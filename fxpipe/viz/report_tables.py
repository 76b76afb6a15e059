"""The tables of the report: schedules side by side, and the stages of the pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from fxpipe.graph.pipe import Pipe
from fxpipe.program import Kind, Program, StageCosts, Timeline, ValueKind
from fxpipe.text import count_text, flops_text
from fxpipe.viz.drawing.numbers import Unit
from fxpipe.viz.pipe_picture.outline import Outline, make_outline

__all__ = ["comparison_table", "stage_table"]


def comparison_table(
    candidates: Sequence[tuple[str, Program, Timeline]], time: Unit, memory: Unit
) -> str:
    """One row per candidate, to sort and to choose from."""
    heads = ["Schedule", "Microbatches", "Stages", "Makespan", "Per microbatch", "Idle"]
    heads += ["Idle once started", "Peak memory"]
    slowest = max(timeline.makespan for _, _, timeline in candidates) or 1.0
    rows = [
        _comparison_row(index, *candidate, time, memory, slowest)
        for index, candidate in enumerate(candidates)
    ]
    head = "".join(
        f'<th scope="col"{_CLASS if name == "Schedule" else ""}>'
        f'<button type="button">{name}</button></th>'
        for name in heads
    )
    return (
        '<section aria-labelledby="comparison-title"><h2 id="comparison-title">Schedules</h2>'
        '<p class="hint">Idle is the share of all ranks’ time without compute; once started, of '
        "the worst rank’s time from its first to its last action. A full bar is the makespan of "
        "the slowest schedule, or all of the time idle. Choose a schedule to see it.</p>"
        '<label class="check" id="all-label" hidden><input type="checkbox" id="all"> '
        "All numbers of microbatches</label>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison of schedules">'
        f'<table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>\n"
    )


_CLASS = ' class="name"'


def _comparison_row(
    index: int,
    name: str,
    program: Program,
    timeline: Timeline,
    time: Unit,
    memory: Unit,
    slowest: float,
) -> str:
    per_microbatch = timeline.makespan / program.num_microbatches
    peak = max(timeline.peak_memory, default=0.0)
    cells = [
        _cell(program.num_microbatches, str(program.num_microbatches)),
        _cell(program.num_stages, str(program.num_stages)),
        _cell(timeline.makespan, time.text(timeline.makespan) + _bar(timeline.makespan / slowest)),
        _cell(per_microbatch, time.text(per_microbatch)),
        _cell(timeline.idle, f"{timeline.idle:.1%}{_bar(timeline.idle)}"),
        _cell(timeline.idle_in_span, f"{timeline.idle_in_span:.1%}"),
        _cell(peak, memory.text(peak) if any(timeline.memory) else "not measured"),
    ]
    button = f'<button type="button">{escape(name)}</button>'
    return (
        f'<tr data-schedule="{index}"><th scope="row" class="name" '
        f'data-value="{escape(name)}">{button}</th>{"".join(cells)}</tr>'
    )


def _cell(value: float, text: str) -> str:
    return f'<td data-value="{value:.9g}">{text}</td>'


def _bar(share: float) -> str:
    return f'<span class="cell-bar"><i style="width:{100 * share:.1f}%"></i></span>'


def stage_table(
    pipe: Pipe | None,
    costs: StageCosts | None,
    flops: Sequence[float] | None,
    sizes: Mapping[str, int] | None,
    program: Program,
    time: Unit,
    memory: Unit,
) -> str:
    """One row per stage; what is not known has no column."""
    if pipe is None and costs is None:
        return ""
    outline = None
    if pipe is not None:
        outline = make_outline(pipe, "stages", flops=flops, sizes=sizes)
    num_stages = program.num_stages if pipe is None else pipe.num_stages
    columns = [*_model_columns(outline), *_cost_columns(costs, time, memory)]
    head = '<th scope="col" class="name">Stage</th><th scope="col">Rank</th>' + "".join(
        f'<th scope="col"{" class=words" if is_words else ""}>{name}</th>'
        for name, is_words, _ in columns
    )
    rows = []
    for stage in range(num_stages):
        placed = program.placement.stage_to_rank
        rank = placed[stage] if stage < len(placed) else ""
        cells = "".join(
            f'<td class="words">{text(stage)}</td>' if is_words else f"<td>{text(stage)}</td>"
            for _, is_words, text in columns
        )
        rows.append(
            f'<tr><th scope="row" class="name">{stage}</th>'
            f'<td data-stage-rank="{stage}">{rank}</td>{cells}</tr>'
        )
    return (
        '<section aria-labelledby="stages-title"><h2 id="stages-title">Stages</h2>'
        '<p class="hint">Times and bytes are those of one microbatch. A full bar is the heaviest '
        "stage.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of stages"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>\n"
    )


_Column = tuple[str, bool, Callable[[int], str]]


def _model_columns(outline: Outline | None) -> list[_Column]:
    if outline is None:
        return []
    stages = outline.stages

    def contents(stage: int) -> str:
        return escape(", ".join(part.title for part in stages[stage].parts))

    def share(stage: int) -> str:
        heaviest = max(other.share for other in stages) or 1.0
        return f"{stages[stage].share:.1%}{_bar(stages[stage].share / heaviest)}"

    def sends(stage: int) -> str:
        crossings = [
            f"{c.lines[0]} {c.spec} · {c.size} to stage {c.target}"
            for c in outline.crossings
            if c.source == stage
        ]
        shared = [
            f"{s.name} {s.spec} · {s.size} to {s.targets_text}"
            for s in outline.shared
            if s.source == stage
        ]
        return "<br>".join(map(escape, crossings + shared))

    columns: list[_Column] = [
        ("Contents", True, contents),
        ("Parameters", False, lambda stage: count_text(stages[stage].parameters)),
        (f"Share of {outline.load}", False, share),
        ("Sends", True, sends),
    ]
    if stages[0].flops is not None:
        columns.insert(2, ("FLOPs", False, lambda stage: flops_text(stages[stage].flops or 0.0)))
    return columns


def _cost_columns(costs: StageCosts | None, time: Unit, memory: Unit) -> list[_Column]:
    if costs is None:
        return []

    def took(kind: Kind) -> Callable[[int], str]:
        return lambda stage: time.text(costs.compute(kind, stage))

    def held(stage: int) -> str:
        return memory.text(costs.value_bytes(ValueKind.RESIDUAL, stage, stage))

    return [
        ("Forward", False, took(Kind.FORWARD)),
        ("Backward", False, took(Kind.BACKWARD)),
        ("Activations", False, held),
    ]
