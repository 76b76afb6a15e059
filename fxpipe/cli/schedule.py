"""`fxpipe schedule`: list, show, check and convert schedules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fxpipe.cli.options import AsJson, Microbatches, Ranks, Stages, complete_schedule
from fxpipe.cli.output import examples, make_table, out, print_json, text_to_write
from fxpipe.errors import InputError

if TYPE_CHECKING:
    from fxpipe.program import Program
    from fxpipe.program.generators import ScheduleInfo

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="List, show, check and convert schedules.")

Format = Literal["csv", "json", "txt"]
_NAME = "A schedule such as 1F1B, or a file (.csv, .json, .txt)."
_Name = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help=_NAME, autocompletion=complete_schedule)
]
_Lower = Annotated[bool, typer.Option("--lower", help="Add the transfers between ranks.")]


@app.command("list", epilog=examples("fxpipe schedule list", "fxpipe schedule list --json"))
def list_schedules(as_json: AsJson = False) -> None:
    """List every schedule: what it does and when to use it."""
    from fxpipe.program.generators import SCHEDULES

    if as_json:
        print_json([_info_json(info) for info in SCHEDULES.values()])
        return
    rows = [
        (info.name, _per_rank(info), info.description, info.when_to_use)
        for info in SCHEDULES.values()
    ]
    out().print(make_table("", ("schedule", "stages per rank", "what", "when"), rows))


@app.command(
    epilog=examples(
        "fxpipe schedule show 1F1B --ranks 4 --microbatches 8",
        "fxpipe schedule show zbv -p 4 -m 8 --lower --format csv",
    )
)
def show(
    name: _Name,
    ranks: Ranks = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    lowered: _Lower = False,
    form: Annotated[
        Format | None, typer.Option("--format", help="Print the program alone, so.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the program of a schedule: which rank does what, in which order."""
    from fxpipe.cli.named.programs import find_program
    from fxpipe.program import lower, validate
    from fxpipe.program.generators import SCHEDULES

    program = find_program(name, ranks=ranks, stages=stages, microbatches=microbatches)
    validate(program)
    shown = lower(program) if lowered and not program.is_lowered else program
    if as_json or form is not None:
        text_to_write(_written(shown, form or "json"), None)
        return
    known = SCHEDULES.get(program.name or "")
    typer.echo(f"{typer.style(program.name or name, bold=True)}: {_size_text(program)}")
    if known is not None:
        typer.echo(f"{known.description} {known.when_to_use}")
    typer.echo(_figures(program))
    typer.echo(str(shown))


@app.command(
    epilog=examples("fxpipe schedule check my_schedule.csv", "fxpipe schedule check - < mine.csv")
)
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A CSV, JSON or text table; or -.")],
    as_json: AsJson = False,
) -> None:
    """Check a program that was written by hand or by another tool.

    Finds missing, doubled and misplaced work, messages in different order on two ranks, and
    ranks that wait for each other. Ends with exit code 1 if anything is wrong.
    """
    from fxpipe.cli.named.programs import read_program, sizes_of
    from fxpipe.program import find_faults
    from fxpipe.program.check.faults import report as report_faults

    program = read_program(file)
    faults = find_faults(program)
    if as_json:
        print_json(
            {
                "file": file,
                "is_valid": not faults,
                **sizes_of(program),
                "has_transfers": program.is_lowered,
                "faults": [
                    {
                        "kind": fault.kind.value,
                        "rank": fault.rank,
                        "position": fault.position,
                        "action": str(fault.action),
                        "message": fault.message,
                    }
                    for fault in faults
                ],
            }
        )
        raise typer.Exit(1 if faults else 0)
    if faults:
        raise InputError(f"{file}: {report_faults(program.name, faults)}")
    typer.echo(f"{file} is valid: {_size_text(program)}")
    typer.echo(_figures(program))


@app.command(
    epilog=examples(
        "fxpipe schedule convert mine.csv mine.json",
        "fxpipe schedule convert mine.csv mine_with_transfers.csv --lower",
    )
)
def convert(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A CSV, JSON or text table; or -.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="A .csv, .json or .txt file; or -.")],
    lowered: _Lower = False,
    idle: Annotated[
        bool, typer.Option("--idle", help="CSV: a column for each step, empty where a rank waits.")
    ] = False,
    form: Annotated[
        Format | None, typer.Option("--format", help="What to write, if TO does not say.")
    ] = None,
) -> None:
    """Convert a program from one format to another; it is checked on the way."""
    from fxpipe.cli.named.programs import read_program
    from fxpipe.program import lower, validate

    program = read_program(source)
    validate(program)
    form = form or _form_of(target)
    if idle and (form != "csv" or lowered or program.is_lowered):
        raise InputError("--idle is for CSV without transfers: one column for each step")
    if lowered and program.is_lowered:
        raise InputError(f"{source} has transfers already; leave --lower out")
    program = lower(program) if lowered else program
    text_to_write(program.to_csv(idle=True) if idle else _written(program, form), target)
    if str(target) != "-":
        typer.echo(f"wrote {target}")


def _size_text(program: Program) -> str:
    """Such as "4 ranks, 8 stages, 16 microbatches, 256 actions"."""
    from fxpipe.cli.named.programs import sizes_text

    return f"{sizes_text(program)}, {sum(map(len, program.ranks))} actions"


def _form_of(target: Path) -> Format:
    endings: dict[str, Format] = {".csv": "csv", ".json": "json", ".txt": "txt"}
    if target.suffix.lower() not in endings:
        raise InputError(
            f"cannot tell what to write to {str(target)!r}: end it with .csv, .json or .txt, "
            "or say --format"
        )
    return endings[target.suffix.lower()]


def _written(program: Program, form: Format) -> str:
    if form == "csv":
        return program.to_csv()
    return program.to_json() if form == "json" else str(program)


def _figures(program: Program) -> str:
    from fxpipe.program import simulate

    timeline = simulate(program)
    counts = Counter(action.kind.text for actions in program.ranks for action in actions)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return (
        f"with equal costs: idle {timeline.idle:.1%}, "
        f"peak memory {max(timeline.peak_memory):.4g} microbatches of a rank; {kinds}"
    )


def _per_rank(info: ScheduleInfo) -> str:
    least, most = info.stages_per_rank
    if least == most:
        return str(least)
    return f"{least} or more" if most is None else f"{least} to {most}"


def _info_json(info: ScheduleInfo) -> dict[str, Any]:
    least, most = info.stages_per_rank
    return {
        "name": info.name,
        "aliases": list(info.aliases),
        "placement": info.placement_style,
        "least_stages_per_rank": least,
        "most_stages_per_rank": most,
        "splits_backward": info.splits_backward,
        "description": info.description,
        "when_to_use": info.when_to_use,
    }
