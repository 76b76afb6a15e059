"""`fxpipe report`: one HTML file with the stages, the schedules and their timelines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxpipe.cli.options import (
    AsJson,
    Batch,
    Dtype,
    InputsName,
    Meta,
    Ranks,
    Seq,
    Split,
    Stages,
    complete_model,
    complete_schedule,
    split_names,
)
from fxpipe.cli.output import examples, print_json, working, writable
from fxpipe.errors import InputError, ScheduleError

if TYPE_CHECKING:
    from fxpipe.cli.named.pipes import Traced
    from fxpipe.graph.interface import StageEdge
    from fxpipe.program import Edges, Program, Timeline

__all__ = ["edges_of", "report", "report_examples"]

report_examples = examples(
    "fxpipe report gpt --ranks 4 --out gpt.html",
    "fxpipe report unet -p 2 -s 4 --schedule zbv --schedule vpp -m 4,8,16",
    "fxpipe report --ranks 8 --out schedules.html",
)

_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="The model, as for fxpipe trace; without one the report is about schedules alone.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
_Out = Annotated[Path, typer.Option("--out", "-o", help="The file to write, .html.")]
_Schedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        help="A schedule, or a program in a file. May be repeated; all that fit otherwise.",
        show_default=False,
        autocompletion=complete_schedule,
    ),
]
_Microbatches = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        "-m",
        help="How many microbatches; several with commas to choose from.",
        show_default=False,
    ),
]


def report(
    model: _Model = None,
    path: _Out = Path("report.html"),
    ranks: Ranks = None,
    stages: Stages = None,
    split: Split = None,
    schedules: _Schedules = None,
    microbatches: _Microbatches = None,
    batch: Batch = 2,
    seq: Seq = None,
    inputs: InputsName = None,
    dtype: Dtype = "float32",
    meta: Meta = None,
    as_json: AsJson = False,
) -> None:
    """Write a report to open in a browser: stages, schedules side by side, timelines.

    All stages cost the same in it; fxpipe plan prices them for a machine.
    """
    from fxpipe.viz.report import write_report

    writable(path)
    names = split_names(split)
    if model is None and (names or inputs or seq):
        raise InputError("--split, --inputs and --seq are for a model; name one")
    ranks = 4 if ranks is None else ranks
    traced: Traced | None = None
    if model is not None:
        from fxpipe.cli.named.models import ModelRequest, resolve
        from fxpipe.cli.named.pipes import trace_model

        wanted = stages or (None if names else ranks)
        with working(f"splitting {model}"):
            named = resolve(ModelRequest(model, seq=seq, inputs=inputs, dtype=dtype))
            traced = trace_model(named, batch=batch, num_stages=wanted, split=names, meta=meta)
        stages = traced.pipe.num_stages
    edges = None if traced is None else edges_of(traced.pipe.num_stages, traced.pipe.edges)
    programs = _programs(schedules, ranks, stages, _counts(microbatches, ranks))
    with working(f"simulating {len(programs)} programs"):
        candidates = [_candidate(program, edges) for program in programs]
    written = write_report(
        path,
        candidates,
        pipe=None if traced is None else traced.pipe,
        sizes=None if traced is None else traced.sizes,
        flops=None if traced is None else traced.flops,
        title=f"{ranks} ranks" if traced is None else f"{traced.title} on {ranks} ranks",
        notes=("Times are in units of one forward of one rank's share of the model.",),
    )
    if as_json:
        print_json({"report": str(written), "schedules": [name for name, _, _ in candidates]})
        return
    typer.echo(f"wrote {written}")


def edges_of(num_stages: int, edges: tuple[StageEdge, ...]) -> Edges:
    """The edges of a pipe as programs know them."""
    from fxpipe.program import Edge, Edges

    return Edges.of(num_stages, [Edge(e.source, e.target, e.has_gradient) for e in edges])


def _counts(text: str | None, ranks: int) -> list[int]:
    if text is None:
        return [2 * ranks]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError(f"--microbatches is a number from 1 up, or several with commas: {text!r}")
    return counts


def _programs(
    names: list[str] | None, ranks: int, stages: int | None, counts: list[int]
) -> list[Program]:
    """The programs to show; without names all that are defined for the sizes."""
    from fxpipe.cli.named.programs import (
        default_stages,
        find_program,
        is_file_name,
        read_program,
    )
    from fxpipe.program.generators import SCHEDULES, get_schedule

    found = []
    for name in names or [name for name in SCHEDULES if name != "ForwardOnly"]:
        if is_file_name(name):
            found.append(read_program(name))
            continue
        info = get_schedule(name)
        number = default_stages(info, ranks) if stages is None else stages
        for count in counts:
            try:
                found.append(find_program(name, ranks=ranks, stages=number, microbatches=count))
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
