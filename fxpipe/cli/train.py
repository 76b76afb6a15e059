"""`fxpipe train` and `fxpipe demo`: train on several processes, started by torchrun or by itself.

The demo trains a small GPT beside the plain model, draws pictures, and fails if the pipeline's
gradients are not the plain model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxpipe.cli.launch import is_rank, run_again
from fxpipe.cli.options import (
    AsJson,
    Batch,
    Microbatches,
    RunnableModel,
    Seed,
    complete_schedule,
    with_options,
)
from fxpipe.cli.output import bar, err, examples, make_table, out, print_json, writable
from fxpipe.errors import FxpipeError
from fxpipe.text import seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from fxpipe.cli.named.models import ModelRequest
    from fxpipe.cli.trainer import StepReport, Trainer

__all__ = [
    "TrainOptions",
    "check_difference",
    "counting",
    "counting_target",
    "demo",
    "demo_examples",
    "gradient_difference",
    "show_result",
    "train",
    "train_examples",
    "train_with_bar",
]

train_examples = examples(
    "fxpipe train gpt --nproc 2 --compare",
    "fxpipe train 'gpt?layers=8' --schedule zbv --nproc 4 --microbatches 8",
    "torchrun --nproc-per-node 2 -m fxpipe train gpt --data mine.py:batches",
)

_SCHEDULE = "A schedule, or a program in a file (.csv, .json)."
_NPROC = "Processes to start; torchrun says it itself."
_LOCAL = "All ranks in this process, to look for errors."
_DATA = (
    "Batches: file.py:name, an iterable of (inputs, target), or a function of the "
    "batch size that returns one; the same on every rank. Made-up data otherwise."
)
_LOSS = "The loss: file.py:name, of output and target."
_TARGET = "A function that makes example targets, file.py:name."
_COMPARE = "Train the plain model beside it and compare."
_TIMELINE = "Draw the last step as measured: .svg, .png, .txt or .json."


@dataclass(frozen=True)
class TrainOptions(RunnableModel):
    """What to train, and how; equal on all ranks."""

    batch: Batch = 16
    schedule: Annotated[str, typer.Option(help=_SCHEDULE, autocompletion=complete_schedule)] = (
        "1F1B"
    )
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help=_NPROC)] = 2
    local: Annotated[bool, typer.Option("--local", help=_LOCAL)] = False
    microbatches: Microbatches = None
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 20
    learning_rate: Annotated[float, typer.Option("--lr", min=0.0, help="Learning rate.")] = 1e-3
    optimizer: Annotated[str, typer.Option(help="An optimizer of torch.optim.")] = "AdamW"
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto"
    data: Annotated[str | None, typer.Option(help=_DATA)] = None
    loss: Annotated[str | None, typer.Option(help=_LOSS)] = None
    target: Annotated[str | None, typer.Option(help=_TARGET)] = None
    seed: Seed = 0
    compare: Annotated[bool, typer.Option("--compare", help=_COMPARE)] = False

    def request(self) -> ModelRequest:
        asked = super().request()
        return replace(asked, target=self.target, loss=self.loss, seed=self.seed)


@with_options
def train(
    options: TrainOptions,
    context: typer.Context,
    timeline: Annotated[Path | None, typer.Option(help=_TIMELINE)] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model across processes.

    Under torchrun every process is a rank. Otherwise --nproc processes are started here.
    """
    picture = None if timeline is None else writable(timeline)
    if not options.local and not is_rank():
        run_again(context, options.nproc)
        return
    from fxpipe.cli.trainer import Trainer

    trainer = Trainer(options)
    reports = train_with_bar(trainer, every=max(1, options.steps // 10), quiet=as_json)
    trainer.close()
    if not trainer.is_reporter:
        return
    if picture is not None:
        from fxpipe.viz import draw_timeline

        title = f"{options.model}, {options.schedule}, measured"
        draw_timeline(trainer.pipe.schedule.timeline, picture, title=title, time_unit="s")
    if as_json:
        print_json(_json(trainer, reports, picture))
        return
    show_result(trainer, reports)
    if picture is not None:
        typer.echo(f"wrote {picture}")


def train_with_bar(trainer: Trainer, *, every: int, quiet: bool = False) -> list[StepReport]:
    """Train; the first rank shows a bar and prints each `every`th step."""
    console: Console = err() if quiet else out()
    if trainer.is_reporter and not quiet:
        from fxpipe.cli.named.pipes import stage_table

        console.print(stage_table(trainer.traced))
        _warn_of_dropout(trainer)
    steps = trainer.settings.steps
    with bar(console) as progress:
        name = str(trainer.program.name or "training")
        task = progress.add_task(name, total=steps, visible=trainer.is_reporter)

        def observe(report: StepReport) -> None:
            progress.advance(task)
            is_shown = report.step % every == 0 or report.step == steps - 1
            if trainer.is_reporter and is_shown:
                progress.console.print(f"step {report.step:>4}  {_loss_text(report)}")

        return trainer.run(observe)


def show_result(trainer: Trainer, reports: list[StepReport]) -> None:
    """Print the last step as it was measured, and a table of figures."""
    from fxpipe.cli.named.programs import sizes_text
    from fxpipe.viz import TimelineView

    timeline = trainer.pipe.schedule.timeline
    out().print(TimelineView(timeline, title="the last step, measured", time_unit="s"))
    seconds, program = _seconds(reports), trainer.program
    rows = [
        ("schedule", f"{program.name or trainer.settings.schedule}: {sizes_text(program)}"),
        ("first loss", f"{reports[0].loss:.6f}"),
        ("last loss", f"{reports[-1].loss:.6f}"),
        ("step", f"{seconds_text(seconds)}, {trainer.settings.batch / seconds:.1f} rows/s"),
    ]  # fmt: skip
    if trainer.plain is not None:
        worst = max(abs(r.loss - (r.plain_loss or 0.0)) for r in reports)
        rows += [
            ("largest loss difference", f"{worst:.1e}"),
            ("largest gradient difference", f"{gradient_difference(reports):.1e}"),
        ]
    out().print(make_table("", ("result", ""), rows))


def _loss_text(report: StepReport) -> str:
    text = f"loss {report.loss:.6f}"
    if report.plain_loss is not None:
        text += f"  plain {report.plain_loss:.6f}"
        text += f"  gradients differ by {report.gradient_difference:.1e}"
    return text


def _warn_of_dropout(trainer: Trainer) -> None:
    if trainer.plain is None:
        return
    from torch import nn

    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    found = [n for n, m in trainer.plain.named_modules() if isinstance(m, kinds) and m.p > 0]
    if found:
        typer.echo(
            f"note: {len(found)} dropout modules ({found[0]}, ...) draw other random numbers in a "
            "pipeline than in the plain model, so the two will differ; set dropout to 0 to compare",
            err=True,
        )


def _seconds(reports: list[StepReport]) -> float:
    """The median time of a step; the first one also prepares the others."""
    import statistics

    return statistics.median(report.seconds for report in reports[1:] or reports)


def gradient_difference(reports: list[StepReport]) -> float:
    """The largest difference of all steps."""
    return max(r.gradient_difference or 0.0 for r in reports)


def _json(trainer: Trainer, reports: list[StepReport], picture: Path | None) -> dict[str, Any]:
    from fxpipe.cli.named.programs import sizes_of

    program = trainer.program
    data: dict[str, Any] = {
        "model": trainer.settings.model,
        "schedule": program.name or trainer.settings.schedule,
        **sizes_of(program),
        "batch": trainer.settings.batch,
        "losses": [report.loss for report in reports],
        "seconds_per_step": _seconds(reports),
    }
    if trainer.plain is not None:
        data["plain_losses"] = [report.plain_loss for report in reports]
        data["gradient_difference"] = gradient_difference(reports)
    if picture is not None:
        data["timeline"] = str(picture)
    return data


demo_examples = examples("fxpipe demo", "fxpipe demo --steps 5 --out pictures")

_VOCAB, _LENGTH = 64, 32
_MODEL = f"gpt?vocab={_VOCAB}&width=64&length={_LENGTH}"
# In float32 the rounding of two runs grows step by step to more than a small mistake is.
_TOLERANCE = 1e-8
_LIMIT = 600.0


def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 20,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where pictures go.")] = Path("out"),
) -> None:
    """Train a small GPT on two processes with 1F1B and compare it with the plain model.

    The model learns to count. Prints both losses and the largest gradient difference of
    each step, the stages and a timeline, and writes pictures and a report. Takes about half
    a minute.
    """
    writable(folder / "timeline.svg")
    if not is_rank():
        typer.echo("Training a small GPT on 2 processes with 1F1B, beside the plain model.")
        run_again(context, 2, limit=_LIMIT)
        return
    from fxpipe.cli.trainer import Trainer

    settings = TrainOptions(
        _MODEL,
        stages=2,
        batch=16,
        inputs=f"{__name__}:counting",
        target=f"{__name__}:counting_target",
        dtype="float64",
        microbatches=4,
        steps=steps,
        learning_rate=1e-2,
        device="cpu",
        compare=True,
    )
    trainer = Trainer(settings, plain_in_parts=False)
    reports = train_with_bar(trainer, every=1)
    trainer.close()
    if trainer.is_reporter:
        show_result(trainer, reports)
        check_difference(gradient_difference(reports))
        typer.echo("wrote " + "\n      ".join(map(str, draw_demo(trainer, folder))))


def counting(batch_size: int, seed: int = 0) -> Tensor:
    """Sequences that count up from random numbers."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(_VOCAB, (batch_size, 1), generator=generator)
    return (start + torch.arange(_LENGTH)) % _VOCAB


def counting_target(batch_size: int, seed: int = 0) -> Tensor:
    """For each number of `counting` the next one."""
    return (counting(batch_size, seed) + 1) % _VOCAB


def check_difference(worst: float) -> None:
    """Fail if the pipeline does not compute what the plain model does."""
    if not worst <= _TOLERANCE:
        raise FxpipeError(
            f"the gradients differ from the plain model's by {worst:.1e}, "
            f"more than {_TOLERANCE:.0e}: please report this"
        )


def draw_demo(trainer: Trainer, folder: Path) -> list[Path]:
    """The pictures of the stages and of the last step, and the report."""
    from fxpipe.program import simulate
    from fxpipe.program.generators import get_schedule
    from fxpipe.viz import draw_pipe, draw_timeline, stretch, write_report

    traced, program = trainer.traced, trainer.program
    measured = trainer.pipe.schedule.timeline
    simulated = simulate(program)
    factor = sum(measured.busy) / sum(simulated.busy)
    others = [get_schedule(name)(2, 2, program.num_microbatches) for name in ("GPipe", "ZBH1")]
    candidates = [
        (f"{program.name}, measured", program, measured),
        *((p.name, p, stretch(simulate(p), factor)) for p in (program, *others)),
    ]
    return [
        draw_pipe(traced.pipe, folder / "gpt.svg", title="A small GPT", **traced.figures),
        draw_timeline(
            stretch(simulated, factor),
            folder / "timeline.svg",
            title=f"{program.name}: simulated above, measured below",
            measured=measured,
            time_unit="s",
        ),
        write_report(
            folder / "report.html",
            candidates,
            pipe=traced.pipe,
            title="A small GPT on two processes",
            notes=("Simulated steps take as long as the measured one computes.",),
            time_unit="s",
            **traced.figures,
        ),
    ]
