"""Options that several commands share, so that the same thing has the same name everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fxpipe.errors import InputError

if TYPE_CHECKING:
    from fxpipe.cli.named.models import ModelRequest
    from fxpipe.cli.named.pipes import Traced

__all__ = [
    "AsJson",
    "Dtype",
    "InputsName",
    "Meta",
    "Microbatches",
    "ModelName",
    "ModelOptions",
    "Ranks",
    "RunnableModel",
    "Seed",
    "Seq",
    "Stages",
    "complete_model",
    "complete_schedule",
    "numbers",
    "split_names",
    "with_options",
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
    from fxpipe.cli.named.references import example_models

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
    return names + [name for name in ("hf:", *example_models()) if name.startswith(incomplete)]


_MODEL = (
    "The model: an example (gpt, unet, ...), a known one (llama3-8b, deepseek-v3, ...), "
    "file.py:factory, package.module:factory, hf:config.json or "
    "hf:llama?num_hidden_layers=4 (options after '?', so put it in quotes)."
)
_SPLIT = "Begin a stage at this module, for example blocks.2. May be repeated, or a list."
_INPUTS = "A function that makes example inputs, file.py:name; called with the batch size."
_META = "Build the model without weights, so that it may be of any size; the default for hf:."

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help=_MODEL, autocompletion=complete_model)
]
Stages = Annotated[int | None, typer.Option("--stages", "-s", min=1, help="Number of stages.")]
Ranks = Annotated[
    int | None, typer.Option("--ranks", "-p", min=1, help="Number of ranks (processes).")
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", min=1, help="Into how many parts a batch is split."),
]
Split = Annotated[list[str] | None, typer.Option("--split", help=_SPLIT)]
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Rows of a batch.")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, help="Sequence length.")]
InputsName = Annotated[str | None, typer.Option("--inputs", help=_INPUTS)]
Dtype = Annotated[str, typer.Option("--dtype", help="float64, float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and data.")]
Meta = Annotated[bool | None, typer.Option("--meta/--no-meta", help=_META)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@dataclass(frozen=True)
class RunnableModel:
    """The options by which a command names a model, its example inputs and its stages."""

    model: ModelName
    stages: Stages = None
    split: Split = None
    batch: Batch = 2
    seq: Seq = None
    inputs: InputsName = None
    dtype: Dtype = "float32"

    def request(self) -> ModelRequest:
        """What is asked for."""
        from fxpipe.cli.named.models import ModelRequest

        return ModelRequest(self.model, self.seq, self.inputs, dtype=self.dtype)


@dataclass(frozen=True)
class ModelOptions(RunnableModel):
    """Options for a model that may be built without weights."""

    meta: Meta = None

    def trace(self) -> Traced:
        """Build the model and split it."""
        from fxpipe.cli.output import working

        with working(f"splitting {self.model}"):
            from fxpipe.cli.named.models import resolve
            from fxpipe.cli.named.pipes import split_model

            model, split = resolve(self.request()), split_names(self.split)
            example = model.inputs(self.batch)
            module = model.build(meta=self.meta)
            return split_model(model, module, example, num_stages=self.stages, split=split)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer: the fields of its first argument's class become its options."""
    hints = get_type_hints(command, include_extras=True)
    first, *others = inspect.signature(command).parameters.values()
    made = hints[first.name]
    own = inspect.signature(made).parameters
    hints |= get_type_hints(made, include_extras=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in (*own.values(), *others)
    ]

    def run(**given: Any) -> None:
        command(made(**{name: given.pop(name) for name in own}), **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


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


def numbers(option: str, text: str, *, least: int = 1) -> list[int]:
    """The whole numbers of an option such as 1,2,4.

    Raises:
        InputError: it is none, or one is too small.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise InputError(
            f"{option} is a number from {least} up, or several with commas; got {text!r}"
        )
    return found
