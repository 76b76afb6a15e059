"""Write the report: one HTML file with pictures, tables and a timeline to explore.

In:  schedules with their programs and timelines, and optionally the pipe and its costs.
Out: HTML that needs no network, no server and no other file.

The page's own code is in `page/`; it draws from data that this module embeds and knows
nothing of schedules: dependencies, lanes and figures are worked out here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fxpipe.errors import FxpipeError
from fxpipe.graph.pipe import Pipe
from fxpipe.program import Edge, Edges, Kind, Program, StageCosts, Timeline, ValueKind
from fxpipe.text import count_text, flops_text
from fxpipe.viz.graph import pipe_svg
from fxpipe.viz.numbers import Unit
from fxpipe.viz.palette import DARK, LIGHT, LOOKS, Theme, shades, tone
from fxpipe.viz.pipe_picture.outline import Outline, make_outline
from fxpipe.viz.timeline_picture.spans import find_dependencies, pack_lanes

__all__ = ["Candidate", "comparison_table", "report_html", "stage_table", "write_report"]

_SCRIPTS = ("format.js", "model.js", "shapes.js", "chart.js", "app.js")
_LEGEND = {
    Kind.SEND_ACTIVATION: "activation, dark where sent, light where received",
    Kind.SEND_GRADIENT: "gradient",
    Kind.RECV_ACTIVATION: "",
    Kind.RECV_GRADIENT: "",
    Kind.RESHARD: "",
    Kind.OVERLAP: "",
}


class Candidate(NamedTuple):
    """A schedule to show: its name, its program and when everything in it happens."""

    name: str
    program: Program
    timeline: Timeline


def write_report(
    path: str | os.PathLike[str],
    candidates: Sequence[tuple[str, Program, Timeline]],
    **options: Any,
) -> Path:
    """Write the report to a file and return its path; see `report_html` for the options."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise FxpipeError(f"a report is an HTML file, but {path.name!r} does not end with .html")
    path.write_text(report_html(candidates, **options), encoding="utf-8")
    return path


def report_html(
    candidates: Sequence[tuple[str, Program, Timeline]],
    *,
    pipe: Pipe | None = None,
    costs: StageCosts | None = None,
    flops: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
    edges: Edges | None = None,
    title: str = "Pipeline report",
    notes: Sequence[str] = (),
    time_unit: str = "",
    memory_unit: str = "",
    chosen: int = 0,
) -> str:
    """The report as HTML text.

    Args:
        candidates: the schedules to choose from; one schedule may come several times, with
            different numbers of microbatches.
        pipe: the split model, for the stage graph and the stage table.
        costs: of the pipe's stages, for the stage table.
        flops: of one microbatch, per stage.
        sizes: values of the pipe's size symbols, for bytes per microbatch.
        edges: between stages, for dependencies; by default the pipe's, or else a chain. Used
            for candidates with that number of stages, a chain for others.
        notes: lines of text below the title.
        time_unit: "s", "ms" or "us", or any other word.
        memory_unit: "bytes", or any other word.
        chosen: the candidate that is shown first.

    Raises:
        FxpipeError: there is no candidate, `chosen` is not one of them, or figures do not fit
            the pipe's stages.
    """
    found = [Candidate(*candidate) for candidate in candidates]
    if not found:
        raise FxpipeError("a report needs at least one schedule to show, got none")
    if not 0 <= chosen < len(found):
        raise FxpipeError(f"chosen is one of the {len(found)} candidates from 0, got {chosen}")
    if edges is None and pipe is not None:
        between = [Edge(edge.source, edge.target, edge.has_gradient) for edge in pipe.edges]
        edges = Edges.of(pipe.num_stages, between)
    time, memory = Unit(time_unit), Unit(memory_unit)
    data = {
        "kinds": [_kind_data(kind) for kind in Kind],
        "schedules": [_schedule_data(candidate, edges) for candidate in found],
        "chosen": chosen,
        "time_unit": time_unit,
        "memory_unit": memory_unit,
    }
    times = _times(pipe, costs)
    parts = {
        "title": escape(title),
        "colours": f":root {{ {_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}",
        "style": _page_file("style.css"),
        "notes": "".join(f'<p class="notes">{escape(note)}</p>' for note in notes),
        "comparison": comparison_table(found, time, memory),
        "stages": stage_table(pipe, costs, flops, sizes, found[chosen].program, time, memory),
        "graph": _graph(pipe, flops, times, sizes),
        # The data stands inside a script element: a "<" could end it.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "".join(_page_file(name) for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _page_file("page.html"))


def _variables(theme: Theme) -> str:
    """The colours as the page's own code asks for them."""
    return " ".join(f"--{name}: {colour};" for name, colour in asdict(theme).items())


def _page_file(name: str) -> str:
    return (resources.files("fxpipe.viz") / "page" / name).read_text(encoding="utf-8")


def _times(pipe: Pipe | None, costs: StageCosts | None) -> list[float] | None:
    if pipe is None or costs is None:
        return None
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [sum(costs.compute(kind, stage) for kind in kinds) for stage in range(pipe.num_stages)]


def _graph(
    pipe: Pipe | None,
    flops: Sequence[float] | None,
    times: Sequence[float] | None,
    sizes: Mapping[str, int] | None,
) -> str:
    if pipe is None:
        return ""
    svg = pipe_svg(pipe, flops=flops, times=times, sizes=sizes)
    svg = svg.replace(' style="max-width:100%;height:auto"', "", 1)
    return (
        '<section aria-labelledby="graph-title"><h2 id="graph-title">Stage graph</h2>'
        f'<div class="scroll graph" tabindex="0" role="region" aria-label="Stage graph">{svg}'
        "</div></section>"
    )


def _kind_data(kind: Kind) -> dict[str, Any]:
    look = LOOKS[kind]
    forwards = kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
    return {
        "text": kind.text,
        "letter": look.letter,
        "name": look.name,
        "colour": look.colour,
        "hatch": look.hatch,
        "legend": _LEGEND.get(kind, look.name),
        "transfer": kind.is_transfer,
        "sends": kind.is_send,
        "direction": (1 if forwards else -1) if kind.is_transfer else 0,
    }


def _schedule_data(candidate: Candidate, edges: Edges | None) -> dict[str, Any]:
    """All that the page needs of a schedule, spans as columns of numbers."""
    name, program, timeline = candidate
    spans = timeline.spans
    if edges is None or edges.num_stages != program.num_stages:
        edges = Edges.chain(program.num_stages)
    index_of = {span: index for index, span in enumerate(spans)}
    critical = [index_of[span] for span in timeline.critical_path]
    stages = shades(spans)
    return {
        "name": name,
        "ranks": program.num_ranks,
        "stages": program.num_stages,
        "microbatches": program.num_microbatches,
        "stage_to_rank": program.placement.stage_to_rank,
        "makespan": _short(timeline.makespan),
        "idle": _short(timeline.idle),
        "idle_per_rank": [_short(idle) for idle in timeline.idle_per_rank],
        "peak": [_short(peak) for peak in timeline.peak_memory],
        "memory": [[_short(n) for point in curve for n in point] for curve in timeline.memory],
        "rank": [span.rank for span in spans],
        "kind": [int(span.action.kind) for span in spans],
        "stage": [span.action.stage for span in spans],
        "microbatch": [_or_none(span.action.microbatch) for span in spans],
        "peer": [_or_none(span.action.peer) for span in spans],
        "start": [_short(span.start) for span in spans],
        "end": [_short(span.end) for span in spans],
        "lane": _lanes(timeline),
        "parts": {
            index: [(int(p.kind), p.stage, _or_none(p.microbatch)) for p in span.action.parts]
            for index, span in enumerate(spans)
            if span.action.parts
        },
        "waits": find_dependencies(spans, edges),
        "critical": critical,
        "tones": [round(tone(*stages.get(s, (0, 1))), 3) for s in range(program.num_stages)],
    }


def _lanes(timeline: Timeline) -> list[int]:
    """For each span -1 if it is compute, else its lane among what runs beside compute."""
    lanes = [-1] * len(timeline.spans)
    index_of = {span: index for index, span in enumerate(timeline.spans)}
    for rank in range(timeline.num_ranks):
        beside = [span for span in timeline.of_rank(rank) if not span.is_compute]
        for lane, spans in enumerate(pack_lanes(beside)):
            for span in spans:
                lanes[index_of[span]] = lane
    return lanes


def _or_none(number: int | None) -> int:
    return -1 if number is None else number


def _short(number: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{number:.7g}")


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
