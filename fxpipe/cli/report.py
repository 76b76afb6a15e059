"""`fxpipe report`: one HTML file with the stages, the schedules and their timelines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxpipe.cli.options import (
    ModelOptions,
    Ranks,
    complete_model,
    complete_schedule,
    numbers,
    split_names,
    with_options,
)
from fxpipe.cli.output import examples, working, writable
from fxpipe.errors import InputError, ScheduleError

if TYPE_CHECKING:
    from fxpipe.program import Edges, Program, Timeline

__all__ = ["report", "report_examples"]

report_examples = examples(
    "fxpipe report gpt --ranks 4 --out gpt.html",
    "fxpipe report unet -p 2 -s 4 --schedule zbv --schedule vpp -m 4,8,16",
    "fxpipe report --ranks 8 --out schedules.html",
)

_MODEL = "The model, as for fxpipe trace; without one the report is about schedules alone."
_SCHEDULES = "A schedule, or a program in a file. May be repeated; all that fit otherwise."
_COUNTS = "How many microbatches; several with commas to choose from."


@dataclass(frozen=True)
class _MaybeModel(ModelOptions):
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=_MODEL, autocompletion=complete_model)
    ] = None  # type: ignore[assignment]


@with_options
def report(
    model: _MaybeModel,
    path: Annotated[Path, typer.Option("--out", "-o", help="The file to write, .html.")] = Path(
        "report.html"
    ),
    ranks: Ranks = None,
    schedules: Annotated[
        list[str] | None,
        typer.Option("--schedule", help=_SCHEDULES, autocompletion=complete_schedule),
    ] = None,
    microbatches: Annotated[str | None, typer.Option("--microbatches", "-m", help=_COUNTS)] = None,
) -> None:
    """Write a report to open in a browser: stages, schedules side by side, timelines.

    All stages cost the same in it; fxpipe plan prices them for a machine.
    """
    from fxpipe.program import Edge, Edges
    from fxpipe.viz.report import write_report

    writable(path)
    ranks = 4 if ranks is None else ranks
    counts = [2 * ranks] if microbatches is None else numbers("--microbatches", microbatches)
    title, stages, edges, known = f"{ranks} ranks", model.stages, None, {}
    if model.model is not None:
        is_open = model.stages is None and not split_names(model.split)
        traced = (replace(model, stages=ranks) if is_open else model).trace()
        pipe = traced.pipe
        title, stages = f"{traced.title} on {ranks} ranks", pipe.num_stages
        edges = Edges.of(stages, [Edge(e.source, e.target, e.has_gradient) for e in pipe.edges])
        known = {"pipe": pipe, **traced.figures}
    elif model.split or model.inputs or model.seq:
        raise InputError("--split, --inputs and --seq are for a model; name one")
    programs = _programs(schedules, ranks, stages, counts)
    with working(f"simulating {len(programs)} programs"):
        candidates = [_candidate(program, edges) for program in programs]
    note = "Times are in units of one forward of one rank's share of the model."
    written = write_report(path, candidates, title=title, notes=(note,), **known)
    typer.echo(f"wrote {written}")


def _programs(
    names: list[str] | None, ranks: int, stages: int | None, counts: list[int]
) -> list[Program]:
    """The programs to show; without names all that are defined for the sizes."""
    from fxpipe.cli.named.programs import find_program, is_file_name, read_program
    from fxpipe.program.generators import SCHEDULES

    found = []
    for name in names or [name for name in SCHEDULES if name != "ForwardOnly"]:
        if is_file_name(name):
            found.append(read_program(name))
            continue
        for count in counts:
            try:
                found.append(find_program(name, ranks=ranks, stages=stages, microbatches=count))
            except ScheduleError:
                if names:
                    raise
    if not found:
        raise InputError(
            f"no schedule is defined for {stages} stages on {ranks} ranks; "
            f"the number of stages must be a multiple of {ranks}"
        )
    return found


def _candidate(program: Program, edges: Edges | None) -> tuple[str, Program, Timeline]:
    from fxpipe.program import Edges, lower, simulate

    if edges is None or edges.num_stages != program.num_stages:
        edges = Edges.chain(program.num_stages)
    lowered = program if program.is_lowered else lower(program, edges)
    name = f"{program.name or 'program'}, {program.num_microbatches} microbatches"
    return name, lowered, simulate(lowered, edges=edges)
