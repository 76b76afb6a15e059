"""`fxpipe simulate`: when everything happens, on paper, for one schedule or several."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fxpipe.cli.options import AsJson, Microbatches, Ranks, Stages, complete_schedule
from fxpipe.cli.output import examples, make_table, out, print_json, working, writable
from fxpipe.errors import InputError

if TYPE_CHECKING:
    from fxpipe.program import Compared, Placement, Program, StageCosts, Timeline

__all__ = ["simulate", "simulate_examples"]


_NAMES = "Schedules such as 1F1B, or files (.csv, .json, .txt)."
_FORWARD = "Time of a forward on one rank; or one time per stage, 1,1,1,2."
_ALL = "All schedules that the sizes allow, quickest first."
_PICTURE = "Draw the timeline: .svg, .png, .txt, or .json for Perfetto."


def simulate(
    names: list[str] | None = typer.Argument(
        None, metavar="[SCHEDULE]...", help=_NAMES, autocompletion=complete_schedule
    ),
    every: bool = typer.Option(False, "--all", help=_ALL),
    ranks: Ranks = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    forward: str = typer.Option("1", help=_FORWARD),
    backward_input: str = typer.Option("1", "--input", help="Time of an input gradient, likewise."),
    backward_weight: str = typer.Option(
        "1", "--weight", help="Time of a weight gradient, likewise."
    ),
    transfer: float = typer.Option(0.0, min=0.0, help="Time of a transfer between two ranks."),
    overlap: bool = typer.Option(True, help="Ranks compute while they transfer."),
    memory: float | None = typer.Option(None, min=0.0, help="With --all: the memory of a rank."),
    picture: Path | None = typer.Option(None, "--out", "-o", help=_PICTURE),
    as_json: AsJson = False,
) -> None:
    """Simulate a step: how long it takes, who waits, and how much memory it needs.

    With one schedule its timeline is drawn in the terminal; with several a table compares
    them. Times are in units of one forward of one rank's share of the model, memory in
    microbatches of it.
    """
    from fxpipe.cli.named.programs import find_program
    from fxpipe.program import simulate as run_simulation
    from fxpipe.viz import TimelineView
    from fxpipe.viz.timeline import program_title

    times = {"forward": forward, "input": backward_input, "weight": backward_weight}

    def costs(placement: Placement) -> StageCosts:
        return _costs(placement, times, transfer, overlap)

    if every:
        if names or picture is not None:
            raise InputError("--all compares all schedules; name some to draw or choose them")
        _compare_all(ranks, stages, microbatches, costs, memory, as_json)
        return
    if memory is not None:
        raise InputError("--memory is for --all: which schedules fit")
    if not names:
        raise InputError("name a schedule, a file, or say --all; see fxpipe schedule list")
    results = []
    for name in names:
        program = find_program(name, ranks=ranks, stages=stages, microbatches=microbatches)
        results.append((program, run_simulation(program, costs(program.placement))))
    pictures = [] if picture is None else _draw(results, picture)
    if as_json:
        rows = [_json(program, timeline) for program, timeline in results]
        for row, path in zip(rows, pictures, strict=False):
            row["picture"] = str(path)
        print_json(rows if len(rows) > 1 else rows[0])
        return
    if len(results) == 1:
        program, timeline = results[0]
        out().print(TimelineView(timeline, title=program_title(program)))
    else:
        out().print(_table(results))
        out().print(_KEY)
    for path in pictures:
        typer.echo(f"wrote {path}")


simulate_examples = examples(
    "fxpipe simulate 1F1B --ranks 4 --microbatches 8",
    "fxpipe simulate --all -p 8 -m 32 --input 1.4 --weight 0.6 --memory 8 --json",
    "fxpipe simulate mine.csv --forward 1,1,1,2 --out mine.svg",
)


_KEY = (
    "idle: share of all time without compute; once started: of the worst rank, between its first "
    "and last action; memory: peak, in microbatches of a rank's share"
)


def _compare_all(
    ranks: int | None,
    stages: int | None,
    microbatches: int | None,
    costs: Callable[[Placement], StageCosts],
    memory: float | None,
    as_json: bool,
) -> None:
    from fxpipe.program.compare import compare

    ranks = 4 if ranks is None else ranks
    per_rank: tuple[int, ...] = (1, 2, 3, 4)
    if stages is not None:
        if stages % ranks:
            raise InputError(f"{stages} stages do not spread evenly over {ranks} ranks")
        per_rank = (stages // ranks,)
    with working("simulating all schedules"):
        comparison = compare(
            ranks,
            2 * ranks if microbatches is None else microbatches,
            stages_per_rank=per_rank,
            costs=costs,
            memory_limit=math.inf if memory is None else memory,
        )
    if as_json:
        print_json([asdict(row) for row in comparison.rows])
        return
    title = f"{comparison.num_ranks} ranks, {comparison.num_microbatches} microbatches"
    columns = ("schedule", "stages#", *_FIGURES, "sends#", *([] if memory is None else [""]))
    rows = [
        (
            row.schedule,
            row.stages_per_rank,
            *_figures(row, row.peak_memory),
            row.num_messages,
            *(
                []
                if memory is None
                else ["" if row.fits else f"over {comparison.memory_limit:.4g}"]
            ),
        )
        for row in comparison.rows
    ]
    out().print(make_table(title, columns, rows))
    out().print(_KEY)


_FIGURES = ("time#", "idle#", "once started#", "memory#")


def _figures(found: Timeline | Compared, peak: float) -> tuple[str, ...]:
    shares = f"{found.idle:.1%}", f"{found.idle_in_span:.1%}"
    return f"{found.makespan:.4g}", *shares, f"{peak:.4g}"


def _costs(
    placement: Placement, times: dict[str, str], transfer: float, overlap: bool
) -> StageCosts:
    from fxpipe.program import Link, StageCost, StageCosts

    share = placement.num_ranks / placement.num_stages
    columns = [_times(name, text, placement.num_stages, share) for name, text in times.items()]
    stages = [
        StageCost(forward=f, backward_input=i, backward_weight=w, residual=share)
        for f, i, w in zip(*columns, strict=True)
    ]
    return StageCosts(tuple(stages), link=Link(latency=transfer), overlaps_transfers=overlap)


def _times(name: str, text: str, num_stages: int, share: float) -> list[float]:
    """A time for each stage; one that is given is a rank's, which its stages share."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--{name} is a number, or numbers with commas; got {text!r}") from None
    if any(not 0 <= value < math.inf for value in found):
        raise InputError(f"--{name} needs numbers from 0 up, got {text!r}")
    if len(found) not in (1, num_stages):
        raise InputError(
            f"--{name} has {len(found)} times for {num_stages} stages; "
            "give one time, or one for each stage"
        )
    return found if len(found) > 1 else [found[0] * share] * num_stages


def _draw(results: list[tuple[Program, Timeline]], picture: Path) -> list[Path]:
    from fxpipe.viz import draw_timeline
    from fxpipe.viz.timeline import program_title

    paths = []
    for program, timeline in results:
        path = picture
        if len(results) > 1:
            path = picture.with_name(f"{picture.stem}-{program.name}{picture.suffix}")
        paths.append(draw_timeline(timeline, writable(path), title=program_title(program)))
    return paths


def _table(results: list[tuple[Program, Timeline]]) -> Any:
    from fxpipe.viz.timeline import program_title

    rows = [
        (program_title(program), *_figures(timeline, max(timeline.peak_memory)))
        for program, timeline in results
    ]
    return make_table("", ("schedule", *_FIGURES), rows)


def _json(program: Program, timeline: Timeline) -> dict[str, Any]:
    from fxpipe.cli.named.programs import sizes_of

    return {
        "schedule": program.name,
        **sizes_of(program),
        "makespan": timeline.makespan,
        "idle": timeline.idle,
        "idle_in_span": timeline.idle_in_span,
        "idle_per_rank": list(timeline.idle_per_rank),
        "peak_memory": list(timeline.peak_memory),
    }
