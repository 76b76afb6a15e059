"""`fxpipe demo`: a small GPT on two processes, beside the plain model, with pictures.

The demo starts torchrun, which starts the ranks. The rank of the last stage prints and draws.
It fails if the pipeline's gradients are not the plain model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from fxpipe.cli.named.models import ModelRequest
from fxpipe.cli.named.pipes import stage_table
from fxpipe.cli.output import bar, examples, make_table, out, writable
from fxpipe.cli.ranks.launch import run_ranks
from fxpipe.cli.ranks.training import StepReport, Trainer, TrainSettings
from fxpipe.errors import FxpipeError, InputError
from fxpipe.program.generators import get_schedule

__all__ = [
    "check_difference",
    "counting",
    "counting_target",
    "demo",
    "demo_examples",
    "run_demo_rank",
]

demo_examples = examples("fxpipe demo", "fxpipe demo --steps 5 --out pictures")

_MODEL = "models/gpt.py"
_VOCAB, _LENGTH = 64, 32
_SIZES = f"vocab={_VOCAB}&width=64&length={_LENGTH}"
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
    settings = TrainSettings(
        ModelRequest(
            f"{_find_model()}:build?{_SIZES}",
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
    writable(folder / "timeline.svg")
    typer.echo(f"Training {_MODEL} on 2 processes with 1F1B, beside the plain model.")
    job = json.dumps({"settings": settings.to_json(), "folder": str(folder)})
    debug = bool(context.find_root().params.get("debug"))
    run_ranks("demo", job, 2, torchrun=True, limit=_LIMIT, debug=debug)


def counting(batch_size: int, seed: int = 0) -> Tensor:
    """Sequences that count up from random numbers."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(_VOCAB, (batch_size, 1), generator=generator)
    return (start + torch.arange(_LENGTH)) % _VOCAB


def counting_target(batch_size: int, seed: int = 0) -> Tensor:
    """The number after each."""
    return (counting(batch_size, seed) + 1) % _VOCAB


def run_demo_rank(text: str) -> None:
    """What each of the two processes does."""
    job = json.loads(text)
    trainer = Trainer(TrainSettings.from_json(job["settings"]), plain_in_parts=False)
    reports = _train(trainer)
    trainer.close()
    if not trainer.is_reporter:
        return
    _show(trainer, reports)
    paths = draw_demo(trainer, Path(job["folder"]))
    typer.echo("\nwrote " + "\n      ".join(map(str, paths)))


def draw_demo(trainer: Trainer, folder: Path) -> list[Path]:
    """The pictures of the stages and of the last step, and the report."""
    from fxpipe.program import simulate
    from fxpipe.viz import draw_timeline, stretch
    from fxpipe.viz.graph import draw_pipe
    from fxpipe.viz.report import write_report

    traced, program = trainer.traced, trainer.program
    measured = trainer.schedule.timeline
    simulated = simulate(program)
    factor = sum(measured.busy) / sum(simulated.busy)
    title = f"{_MODEL}, {program.name}: simulated above, measured below"
    others = [get_schedule(name)(2, 2, program.num_microbatches) for name in ("GPipe", "ZBH1")]
    candidates = [
        (f"{program.name}, measured", program, measured),
        *((p.name, p, stretch(simulate(p), factor)) for p in (program, *others)),
    ]
    return [
        *(
            draw_pipe(
                traced.pipe,
                folder / f"gpt.{ending}",
                title=_MODEL,
                sizes=traced.sizes,
                flops=traced.flops,
            )
            for ending in ("svg", "png")
        ),
        *(
            draw_timeline(
                stretch(simulated, factor),
                folder / f"timeline.{ending}",
                title=title,
                measured=measured,
                time_unit="s",
            )
            for ending in ("svg", "png", "json")
        ),
        write_report(
            folder / "report.html",
            candidates,
            pipe=traced.pipe,
            sizes=traced.sizes,
            flops=traced.flops,
            title=f"{_MODEL} on two processes",
            notes=("Simulated steps take as long as the measured one computes.",),
            time_unit="s",
        ),
    ]


def _find_model() -> Path:
    """models/gpt.py in this folder, or in the checkout that fxpipe is imported from."""
    places = [Path.cwd(), Path(__file__).resolve().parents[2]]
    for place in places:
        if (place / _MODEL).is_file():
            found = place / _MODEL
            return Path(_MODEL) if place == Path.cwd() else found
    raise InputError(
        f"the demo trains {_MODEL}, which is in fxpipe's repository and not in the installed "
        f"package; it is not in {' or '.join(map(str, dict.fromkeys(places)))}. "
        "Run the demo in a checkout: make demo"
    )


def _train(trainer: Trainer) -> list[StepReport]:
    console = out()
    steps = trainer.settings.steps
    if trainer.is_reporter:
        console.print(stage_table(trainer.traced))
        typer.echo(f"{'step':>5}{'pipeline loss':>16}{'plain loss':>13}{'gradients differ by':>21}")
    with bar(console) as progress:
        task = progress.add_task("training", total=steps, visible=trainer.is_reporter)

        def observe(report: StepReport) -> None:
            progress.advance(task)
            if trainer.is_reporter:
                progress.console.print(
                    f"{report.step:>5}{report.loss:>16.6f}{report.plain_loss:>13.6f}"
                    f"{report.gradient_difference:>21.1e}"
                )

        return trainer.run(observe)


def _show(trainer: Trainer, reports: list[StepReport]) -> None:
    from fxpipe.viz import TimelineView

    console = out()
    console.print(
        TimelineView(trainer.schedule.timeline, title="\nThe last step, measured", time_unit="s")
    )
    worst = max(report.gradient_difference or 0.0 for report in reports)
    losses = max(abs((r.loss or 0.0) - (r.plain_loss or 0.0)) for r in reports)
    milliseconds = sorted(report.seconds for report in reports)[len(reports) // 2] * 1e3
    console.print(
        make_table(
            "",
            ("compared with the plain model", ""),
            [
                ("largest gradient difference", f"{worst:.1e}"),
                ("largest loss difference", f"{losses:.1e}"),
                ("loss", f"{reports[0].loss:.4f} -> {reports[-1].loss:.4f}"),
                ("time of a step", f"{milliseconds:.1f} ms"),
            ],
        )
    )
    check_difference(worst)


def check_difference(worst: float) -> None:
    """Fail if the pipeline does not compute what the plain model does."""
    if not worst <= _TOLERANCE:
        raise FxpipeError(
            f"the gradients differ from the plain model's by {worst:.1e}, "
            f"more than {_TOLERANCE:.0e}: please report this"
        )
