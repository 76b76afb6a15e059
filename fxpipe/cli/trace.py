"""`fxpipe trace` and `fxpipe draw`: split a model and look at the stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fxpipe.cli.options import (
    AsJson,
    Batch,
    Dtype,
    InputsName,
    Meta,
    ModelName,
    Seq,
    Split,
    Stages,
    split_names,
)
from fxpipe.cli.output import examples, out, print_json, working, writable

if TYPE_CHECKING:
    from fxpipe.cli.named.pipes import Traced

__all__ = ["draw", "draw_examples", "trace", "trace_examples"]

Depth = Literal["stages", "blocks", "nodes"]

trace_examples = examples(
    "fxpipe trace gpt --stages 4",
    "fxpipe trace 'gpt?layers=8' --split blocks.4 --code",
    "fxpipe trace 'hf:llama?num_hidden_layers=80' --stages 8 --seq 4096 --json",
)
draw_examples = examples(
    "fxpipe draw gpt --stages 4 --out gpt.svg",
    "fxpipe draw unet --stages 4 --depth stages --out unet.png",
    "fxpipe draw gpt --stages 2 --out gpt.md",
)


def trace(
    model: ModelName,
    stages: Stages = None,
    split: Split = None,
    batch: Batch = 2,
    seq: Seq = None,
    inputs: InputsName = None,
    dtype: Dtype = "float32",
    meta: Meta = None,
    code: Annotated[bool, typer.Option("--code", help="Print the code of each stage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Split a model into stages and show what each holds, takes and sends.

    Without --stages and --split the model is cut where it calls pipe_split().
    """
    from fxpipe.cli.named.pipes import pipe_json, stage_table

    traced = _traced(model, stages, split, batch, seq, inputs, dtype, meta)
    if as_json:
        data = pipe_json(traced)
        if code:
            for entry, stage in zip(data["stages"], traced.pipe.stages, strict=True):
                entry["code"] = stage.module.code
        print_json(data)
        return
    console = out()
    console.print(stage_table(traced))
    if traced.pipe.num_stages == 1 and stages is None and not split:
        typer.echo("one stage: the model calls no pipe_split(); ask for more with --stages N")
    if code:
        for stage in traced.pipe.stages:
            console.print(f"\n[bold]stage {stage.index}[/bold]")
            typer.echo(stage.module.code.strip())


def draw(
    model: ModelName,
    picture: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="The picture: .svg, .png, .pdf, .dot, .mmd or .md (Mermaid)."
        ),
    ] = Path("pipe.svg"),
    stages: Stages = None,
    split: Split = None,
    depth: Annotated[
        Depth | None,
        typer.Option(
            help="How far to look into the stages; by default blocks, or stages if there are many.",
            show_default=False,
        ),
    ] = None,
    batch: Batch = 2,
    seq: Seq = None,
    inputs: InputsName = None,
    dtype: Dtype = "float32",
    meta: Meta = None,
    as_json: AsJson = False,
) -> None:
    """Draw a model's stages, the modules in them, and what travels between them."""
    from fxpipe.viz.graph import draw_pipe

    writable(picture)
    traced = _traced(model, stages, split, batch, seq, inputs, dtype, meta)
    with working(f"drawing {picture}"):
        path = draw_pipe(
            traced.pipe,
            picture,
            depth=depth,
            title=traced.title,
            sizes=traced.sizes,
            flops=traced.flops,
        )
    if as_json:
        print_json({"picture": str(path), "num_stages": traced.pipe.num_stages})
        return
    typer.echo(f"wrote {path}")


def _traced(
    model: str,
    stages: int | None,
    split: list[str] | None,
    batch: int,
    seq: int | None,
    inputs: str | None,
    dtype: str,
    meta: bool | None,
) -> Traced:
    with working(f"splitting {model}"):
        from fxpipe.cli.named.models import ModelRequest, resolve
        from fxpipe.cli.named.pipes import trace_model

        return trace_model(
            resolve(ModelRequest(model, seq=seq, inputs=inputs, dtype=dtype)),
            batch=batch,
            num_stages=stages,
            split=split_names(split),
            meta=meta,
        )
