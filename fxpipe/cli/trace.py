"""`fxpipe trace` and `fxpipe draw`: split a model and look at the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fxpipe.cli.options import AsJson, ModelOptions, takes_model
from fxpipe.cli.output import examples, out, print_json, working, writable

__all__ = ["draw", "draw_examples", "trace", "trace_examples"]

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


@takes_model
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


@takes_model
def draw(model: ModelOptions, picture: _Picture = Path("pipe.svg"), depth: _Depth = None) -> None:
    """Draw a model's stages, the modules in them, and what travels between them."""
    from fxpipe.viz.graph import draw_pipe

    writable(picture)
    traced = model.trace()
    with working(f"drawing {picture}"):
        path = draw_pipe(traced.pipe, picture, depth=depth, title=traced.title, **traced.figures)
    typer.echo(f"wrote {path}")
