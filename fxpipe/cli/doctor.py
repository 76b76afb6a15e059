"""`fxpipe doctor`: is everything here that fxpipe needs, and does it work?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from fxpipe.cli.launch import RankFailedError, is_rank, run_again
from fxpipe.cli.options import AsJson
from fxpipe.cli.output import examples, make_table, out, print_json, working
from fxpipe.errors import FxpipeError

__all__ = ["Check", "doctor", "doctor_examples"]

doctor_examples = examples("fxpipe doctor", "fxpipe doctor --json", "fxpipe doctor --no-run")

_EXTRAS = {
    "typer": "the command line",
    "rich": "the command line and colours",
    "vl-convert-python": "PNG and PDF pictures",
    "transformers": "models named hf:...",
}
_LIMIT = 300.0

State = Literal["ok", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. What is `missing` is not needed for the rest."""

    name: str
    state: State
    found: str


def doctor(
    context: typer.Context,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Train on two processes for a moment.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Look at versions, devices and backends, and try two processes.

    Ends with exit code 1 if something that fxpipe needs does not work.
    """
    if is_rank():
        _check_rank()
        return
    with working("looking around"):
        checks = [*_versions(), *_devices(), *_backends()]
    if run:
        with working("training on two processes"):
            checks.append(_try_two_processes(context))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        marks = {"ok": "ok", "missing": "-", "failed": "FAILED"}
        rows = [(check.name, marks[check.state], check.found) for check in checks]
        out().print(make_table("", ("what", "", "found"), rows))
    if any(check.state == "failed" for check in checks):
        raise typer.Exit(1)


def _check_rank() -> None:
    """Train one step on two processes, beside the plain model."""
    from fxpipe.cli.train import TrainOptions
    from fxpipe.cli.trainer import Trainer

    trainer = Trainer(
        TrainOptions("gpt", stages=2, microbatches=4, batch=8, steps=1, device="cpu", compare=True)
    )
    (report,) = trainer.run(lambda report: None)
    trainer.close()
    if not (report.gradient_difference or 0.0) <= 1e-6:
        raise FxpipeError("the stages have other gradients than the plain model")


def _versions() -> Iterator[Check]:
    import importlib.metadata
    import platform

    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Check("system", "ok", platform.platform())
    for name in ("fxpipe", "torch", "sympy"):
        yield Check(name, "ok", importlib.metadata.version(name))
    for name, use in _EXTRAS.items():
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "missing", f"not installed; needed for {use}")


def _devices() -> Iterator[Check]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cpu", "ok", f"{cores} cores, torch uses {torch.get_num_threads()} threads")
    if not torch.accelerator.is_available():
        yield Check("accelerator", "missing", "none; everything runs on the CPU")
        return
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
    names = "" if name_of is None else ": " + ", ".join(map(name_of, range(count)))
    yield Check("accelerator", "ok", f"{count} of type {kind}{names}")


def _backends() -> Iterator[Check]:
    import torch.distributed as dist

    from fxpipe.runtime.wire.communicators import NCCL_STREAMS

    if not dist.is_available():
        yield Check("torch.distributed", "failed", "this build of torch has none")
        return
    yield Check("gloo", *_found(dist.is_gloo_available(), "for CPUs; messages have no queue"))
    use = f"for NVIDIA GPUs; {NCCL_STREAMS}"
    yield Check("nccl", *_found(dist.is_nccl_available(), use, needed=False))


def _found(there: bool, use: str, *, needed: bool = True) -> tuple[State, str]:
    if there:
        return "ok", use
    return "failed" if needed else "missing", f"not in this build of torch; {use}"


def _try_two_processes(context: typer.Context) -> Check:
    start = time.perf_counter()
    try:
        run_again(context, 2, limit=_LIMIT)
    except RankFailedError as error:
        return Check("two processes", "failed", str(error))
    seconds = time.perf_counter() - start
    return Check("two processes", "ok", f"gradients of the plain model over gloo, {seconds:.1f} s")
