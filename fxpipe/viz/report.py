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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from fxpipe.errors import FxpipeError
from fxpipe.graph.pipe import Pipe
from fxpipe.program import Edge, Edges, Kind, Program, StageCosts, Timeline, ValueKind
from fxpipe.text import count_text, flops_text, html_table
from fxpipe.viz.graph import pipe_svg
from fxpipe.viz.palette import DARK, LIGHT, LOOKS, TRANSFERS, Theme, shades, tone
from fxpipe.viz.pipe_picture.outline import Figures, Outline, make_outline, ranges_text
from fxpipe.viz.timeline_picture.spans import Words, find_dependencies, number_lanes

__all__ = ["Candidate", "Table", "report_html", "write_report"]

_SCRIPTS = ("format.js", "model.js", "shapes.js", "chart.js", "app.js")
_NOT_IN_LEGEND = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT, Kind.RESHARD, Kind.OVERLAP)


class Candidate(NamedTuple):
    """A schedule to show: its name, its program and when everything in it happens."""

    name: str
    program: Program
    timeline: Timeline


class Table(NamedTuple):
    """Rows of text, the first is the heading; columns headed as in `left` are words."""

    title: str
    hint: str
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()


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
    tables: Sequence[Table] = (),
    drawn: str = "",
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
        tables: below them, each with a title and a line of text.
        drawn: what to know of the timelines.
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
    words = Words(title, time_unit, memory_unit)
    outline = None if pipe is None else make_outline(pipe, "stages", flops=flops, sizes=sizes)
    data = {
        "kinds": [_kind_data(kind) for kind in Kind],
        "schedules": [_schedule_data(candidate, edges) for candidate in found],
        "chosen": chosen,
        "time_unit": time_unit,
        "memory_unit": memory_unit,
    }
    parts = {
        "title": escape(title),
        "colours": f":root {{ {_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}",
        "style": _page_file("style.css"),
        "notes": "".join(f'<p class="notes">{escape(note)}</p>' for note in notes),
        "tables": "".join(map(_table, tables)),
        "drawn": f'<p class="hint">{escape(drawn)}</p>' if drawn else "",
        "comparison": _comparison(found, words),
        "stages": _stages(outline, costs, found[chosen].program, words),
        "graph": "" if pipe is None else _graph(pipe, costs, flops=flops, sizes=sizes),
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


def _graph(pipe: Pipe, costs: StageCosts | None, **figures: Unpack[Figures]) -> str:
    if costs is not None:
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        stages = range(pipe.num_stages)
        figures["times"] = [sum(costs.compute(kind, stage) for kind in kinds) for stage in stages]
    svg = pipe_svg(pipe, **figures).replace(' style="max-width:100%;height:auto"', "", 1)
    return _section("graph", "Stage graph", "", "Stage graph", svg, look=" graph")


def _kind_data(kind: Kind) -> dict[str, Any]:
    look = LOOKS[kind]
    forwards = kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
    return {
        "text": kind.text,
        "letter": look.letter,
        "name": look.name,
        "colour": look.colour,
        "hatch": look.hatch,
        "legend": "" if kind in _NOT_IN_LEGEND else TRANSFERS.get(kind, look.name),
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
        "lane": number_lanes(spans, lambda span: None if span.is_compute else span.rank),
        "parts": {
            index: [(int(p.kind), p.stage, _or_none(p.microbatch)) for p in span.action.parts]
            for index, span in enumerate(spans)
            if span.action.parts
        },
        "waits": find_dependencies(spans, edges),
        "critical": critical,
        "tones": [round(tone(*stages.get(s, (0, 1))), 3) for s in range(program.num_stages)],
    }


def _or_none(number: int | None) -> int:
    return -1 if number is None else number


def _short(number: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{number:.7g}")


# Tables


def _section(name: str, title: str, hint: str, label: str, content: str, look: str = "") -> str:
    return (
        f'<section aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{hint}'
        f'<div class="scroll{look}" tabindex="0" role="region" aria-label="{label}">{content}'
        "</div></section>\n"
    )


def _table(table: Table) -> str:
    name, title = table.title.lower().replace(" ", "-"), escape(table.title)
    hint = f'<p class="hint">{escape(table.hint)}</p>'
    return _section(name, title, hint, title, html_table(table.rows, names=table.left))


def _comparison(candidates: Sequence[Candidate], words: Words) -> str:
    """One row per candidate, to sort and to choose from."""
    slowest = max(one.timeline.makespan for one in candidates) or 1.0
    rows, heads = [], ['<th scope="col" class="name"><button type="button">Schedule</button></th>']
    for index, candidate in enumerate(candidates):
        cells = _comparison_cells(candidate, words, slowest)
        name = escape(candidate.name)
        rows.append(
            f'<tr data-schedule="{index}"><th scope="row" class="name" data-value="{name}">'
            f'<button type="button">{name}</button></th>'
            + "".join(f'<td data-value="{n:.9g}">{text}</td>' for n, text in cells.values())
            + "</tr>"
        )
    heads += (f'<th scope="col"><button type="button">{head}</button></th>' for head in cells)
    hint = (
        '<p class="hint">Idle is the share of all ranks’ time without compute; once started, of '
        "the worst rank’s time from its first to its last action. A full bar is the makespan of "
        "the slowest schedule, or all of the time idle. Choose a schedule to see it.</p>"
        '<label class="check" id="all-label" hidden><input type="checkbox" id="all"> '
        "All numbers of microbatches</label>"
    )
    table = (
        f'<table class="sortable"><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    return _section("comparison", "Schedules", hint, "Comparison of schedules", table)


def _comparison_cells(
    candidate: Candidate, words: Words, slowest: float
) -> dict[str, tuple[float, str]]:
    """By heading the number to sort by, and what the cell says."""
    _, program, timeline = candidate
    makespan = timeline.makespan
    each = makespan / program.num_microbatches
    peak = max(timeline.peak_memory, default=0.0)
    return {
        "Microbatches": (program.num_microbatches, str(program.num_microbatches)),
        "Stages": (program.num_stages, str(program.num_stages)),
        "Makespan": (makespan, words.time(makespan) + _bar(makespan / slowest)),
        "Per microbatch": (each, words.time(each)),
        "Idle": (timeline.idle, f"{timeline.idle:.1%}{_bar(timeline.idle)}"),
        "Idle once started": (timeline.idle_in_span, f"{timeline.idle_in_span:.1%}"),
        "Peak memory": (peak, words.memory(peak) if any(timeline.memory) else "not measured"),
    }


def _bar(share: float) -> str:
    return f'<span class="cell-bar"><i style="width:{100 * share:.1f}%"></i></span>'


def _stages(
    outline: Outline | None, costs: StageCosts | None, program: Program, words: Words
) -> str:
    """One row per stage; what is not known has no column."""
    if outline is None and costs is None:
        return ""
    columns = [*_model_columns(outline), *_cost_columns(costs, words)]
    looks = [' class="words"' if name in ("Contents", "Sends") else "" for name, _ in columns]
    head = '<th scope="col" class="name">Stage</th><th scope="col">Rank</th>' + "".join(
        f'<th scope="col"{look}>{name}</th>' for look, (name, _) in zip(looks, columns, strict=True)
    )
    ranks: Sequence[int] = program.placement.stage_to_rank
    rows = []
    for stage in range(program.num_stages if outline is None else len(outline.stages)):
        cells = "".join(
            f"<td{look}>{text(stage)}</td>" for look, (_, text) in zip(looks, columns, strict=True)
        )
        rows.append(
            f'<tr><th scope="row" class="name">{stage}</th><td data-stage-rank="{stage}">'
            f"{ranks[stage] if stage < len(ranks) else ''}</td>{cells}</tr>"
        )
    hint = (
        '<p class="hint">Times and bytes are those of one microbatch. A full bar is the heaviest '
        "stage.</p>"
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _section("stages", "Stages", hint, "Table of stages", table)


_Column = tuple[str, Callable[[int], str]]


def _model_columns(outline: Outline | None) -> Iterator[_Column]:
    if outline is None:
        return
    stages = outline.stages
    heaviest = max(stage.share for stage in stages) or 1.0

    def sends(stage: int) -> str:
        values = [*((crossing,) for crossing in outline.crossings), *outline.shared]
        return "<br>".join(
            escape(f"{' '.join(value[0].lines)} to {ranges_text([c.target for c in value])}")
            for value in values
            if value[0].source == stage
        )

    yield "Contents", lambda stage: escape(", ".join(part.title for part in stages[stage].parts))
    yield "Parameters", lambda stage: count_text(stages[stage].parameters)
    if stages[0].flops is not None:
        yield "FLOPs", lambda stage: flops_text(stages[stage].flops or 0.0)
    yield (
        f"Share of {outline.load}",
        lambda stage: f"{stages[stage].share:.1%}{_bar(stages[stage].share / heaviest)}",
    )
    yield "Sends", sends


def _cost_columns(costs: StageCosts | None, words: Words) -> Iterator[_Column]:
    if costs is not None:
        yield "Forward", lambda stage: words.time(costs.compute(Kind.FORWARD, stage))
        yield "Backward", lambda stage: words.time(costs.compute(Kind.BACKWARD, stage))
        yield (
            "Activations",
            lambda stage: words.memory(costs.value_bytes(ValueKind.RESIDUAL, stage, stage)),
        )
