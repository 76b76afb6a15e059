"""`fxpipe demo`: a small GPT on two processes, beside the plain model, with pictures.

It fails if the pipeline's gradients are not the plain model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxpipe.cli.output import examples, writable
from fxpipe.cli.ranks.launch import is_rank, run_again
from fxpipe.errors import FxpipeError

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.cli.ranks.training import Trainer

__all__ = ["check_difference", "counting", "counting_target", "demo", "demo_examples"]

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
    from fxpipe.cli.named.models import ModelRequest
    from fxpipe.cli.ranks.training import Trainer, TrainSettings
    from fxpipe.cli.train import gradient_difference, show_result, train_with_bar

    settings = TrainSettings(
        ModelRequest(
            _MODEL,
            inputs=f"{__name__}:counting",
            target=f"{__name__}:counting_target",
            dtype="float64",
        ),
        schedule="1F1B",
        num_ranks=2,
        num_stages=2,
        num_microbatches=4,
        batch=16,
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
    """The number after each."""
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
