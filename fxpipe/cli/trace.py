"""`fxpipe trace` and `fxpipe draw`: split a model and look at the stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fxpipe.cli.options import AsJson, ModelOptions, RunnableModel, split_names, with_options
from fxpipe.cli.output import (
    err,
    examples,
    make_table,
    out,
    print_error,
    print_json,
    working,
    writable,
)
from fxpipe.errors import TraceError

if TYPE_CHECKING:
    from fxpipe.graph.check.check import CheckReport

__all__ = ["check", "check_examples", "draw", "draw_examples", "trace", "trace_examples"]

Depth = Literal["stages", "blocks", "nodes"]

trace_examples = examples(
    "fxpipe trace gpt --stages 4",
    "fxpipe trace 'gpt?layers=8' --split blocks.4 --code",
    "fxpipe trace 'hf:llama?num_hidden_layers=80' --stages 8 --seq 2048 --json",
)
draw_examples = examples(
    "fxpipe draw gpt --stages 4 --out gpt.svg",
    "fxpipe draw unet --stages 4 --depth stages --out unet.png",
    "fxpipe draw gpt --stages 2 --out gpt.md",
)


@with_options
def trace(
    model: ModelOptions,
    code: Annotated[bool, typer.Option("--code", help="Print the code of each stage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Split a model into stages and show what each holds, takes and sends.

    Without --stages and --split the model is cut where it calls pipe_split().
    """
    from fxpipe.cli.named.pipes import pipe_json, stage_table

    traced = model.trace()
    if as_json:
        data = pipe_json(traced)
        if code:
            for entry, stage in zip(data["stages"], traced.pipe.stages, strict=True):
                entry["code"] = stage.module.code
        print_json(data)
        return
    console = out()
    console.print(stage_table(traced))
    if traced.pipe.num_stages == 1 and model.stages is None and not model.split:
        typer.echo("one stage: the model calls no pipe_split(); ask for more with --stages N")
    if code:
        for stage in traced.pipe.stages:
            console.print(f"\n[bold]stage {stage.index}[/bold]")
            typer.echo(stage.module.code.strip())


_Picture = Annotated[
    Path, typer.Option("--out", "-o", help="The picture: .svg, .png, .pdf, .dot, .mmd or .md.")
]
_Depth = Annotated[
    Depth | None,
    typer.Option(help="How far to look into the stages; blocks unless there are many."),
]


@with_options
def draw(model: ModelOptions, picture: _Picture = Path("pipe.svg"), depth: _Depth = None) -> None:
    """Draw a model's stages, the modules in them, and what travels between them."""
    from fxpipe.viz.graph import draw_pipe

    writable(picture)
    traced = model.trace()
    with working(f"drawing {picture}"):
        path = draw_pipe(traced.pipe, picture, depth=depth, title=traced.title, **traced.figures)
    typer.echo(f"wrote {path}")


check_examples = examples(
    "fxpipe check gpt --stages 4",
    "fxpipe check 'hf:llama?num_hidden_layers=4&hidden_size=64' --stages 2 --seq 16",
    "fxpipe check unet --stages 2 --quick",
)


@with_options
def check(
    model: RunnableModel,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the runs that pipeline() makes itself.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the stages with the plain model: values, sizes, modes, gradients, state.

    Exit code 0: equal, or refused with a clear error; 1: a difference.
    """
    from fxpipe.cli.named.models import resolve
    from fxpipe.cli.named.pipes import split_pipe
    from fxpipe.graph.check.check import Budget, CheckReport
    from fxpipe.graph.pipe import check_pipe

    named = resolve(model.request())
    args, kwargs = named.inputs(model.batch)
    module = named.build(meta=False)
    split = split_names(model.split)
    with working(f"splitting {model.model}"):
        pipe = split_pipe(module, (args, kwargs), num_stages=model.stages, split=split, check=False)
    done: list[str] = []
    fault: TraceError | None = None
    report = CheckReport()
    with err().status("") as status:

        def show(name: str) -> None:
            done.append(name)
            status.update(f"run {len(done)}: {name}")

        try:
            report = check_pipe(
                pipe, module, tuple(args), dict(kwargs),
                budget=Budget(float("inf"), float("inf")), at_length=not quick, progress=show,
            )  # fmt: skip
        except TraceError as error:
            fault = error
    rows = _rows(report, done, fault)
    if as_json:
        print_json(
            {
                "model": model.model,
                "equal": fault is None,
                "runs": [{"run": run, "result": result} for run, result in rows],
                "error": str(fault) if fault else None,
            }
        )
    else:
        title = f"{named.title}, {pipe.num_stages} stages, beside the plain model"
        out().print(make_table(title, ("run", "result"), rows))
    if fault is not None:
        print_error(fault)
        raise typer.Exit(1)


def _rows(report: CheckReport, done: list[str], fault: TraceError | None) -> list[tuple[str, str]]:
    if fault is not None:
        return [*((name, "done") for name in done[:-1]), (done[-1], "DIFFERS")]
    rows = [(name, "equal") for name in report.equal]
    for text in report.refused:
        name, _, reason = text.partition(": ")
        rows.append((name, f"refused: {reason}"))
    return rows + [(text.partition(" (")[0], f"not compared: {text}") for text in report.left_out]
