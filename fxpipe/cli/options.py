"""Options that several commands share, so that the same thing has the same name everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.errors import InputError

__all__ = [
    "AsJson",
    "Batch",
    "Dtype",
    "InputsName",
    "Meta",
    "Microbatches",
    "ModelName",
    "Ranks",
    "Seed",
    "Seq",
    "Split",
    "Stages",
    "complete_model",
    "complete_schedule",
    "split_names",
]


def complete_schedule(incomplete: str) -> list[tuple[str, str]]:
    """Schedules whose name starts so, for the shell's completion."""
    from fxpipe.program.generators import SCHEDULES

    return [
        (name, info.description)
        for name, info in SCHEDULES.items()
        if name.lower().startswith(incomplete.lower())
    ]


def complete_model(incomplete: str) -> list[str]:
    """Python files, folders and example models that start so, and `hf:`."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(folder or ".")
    if not place.is_dir():
        return []
    head = f"{folder}/" if folder else ""
    names = sorted(
        f"{head}{found.name}{'/' if found.is_dir() else ':build'}"
        for found in place.iterdir()
        if found.name.startswith(start)
        and not found.name.startswith((".", "__"))
        and (found.is_dir() or found.suffix == ".py")
    )
    from fxpipe.cli.named.references import example_models

    return names + [name for name in ("hf:", *example_models()) if name.startswith(incomplete)]


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The model: an example (gpt, unet, ...), file.py:factory, package.module:factory, "
        "hf:config.json or hf:llama?num_hidden_layers=4 (options after '?', so put it in quotes).",
        show_default=False,
        autocompletion=complete_model,
    ),
]
Stages = Annotated[
    int | None,
    typer.Option("--stages", "-s", min=1, help="Number of stages.", show_default=False),
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", "-p", min=1, help="Number of ranks (processes).", show_default=False),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches", "-m", min=1, help="Into how many parts a batch is split.",
        show_default=False,
    ),
]  # fmt: skip
Split = Annotated[
    list[str] | None,
    typer.Option(
        "--split",
        help="Begin a stage at this module, for example blocks.2. May be repeated, or a list "
        "with commas.",
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Rows of the example inputs.")]
Seq = Annotated[
    int | None, typer.Option("--seq", min=1, help="Sequence length.", show_default=False)
]
InputsName = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        help="A function that makes example inputs, file.py:name; called with the batch size.",
        show_default=False,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float64, float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and data.")]
Meta = Annotated[
    bool | None,
    typer.Option(
        "--meta/--no-meta",
        help="Build the model without weights, so that it may be of any size; the default for hf:.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def split_names(given: Sequence[str] | None) -> tuple[str, ...]:
    """The modules of repeated and comma-separated `--split` options.

    Raises:
        InputError: a module is named twice.
    """
    names = [name.strip() for text in given or () for name in text.split(",") if name.strip()]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InputError(f"--split names {', '.join(doubled)} twice")
    return tuple(names)
