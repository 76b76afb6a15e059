"""`fxpipe plan`: how to split a model, which schedule, does it fit, how fast will it be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fxpipe.cli.options import (
    AsJson,
    InputsName,
    Meta,
    ModelName,
    Seq,
    complete_schedule,
    numbers,
    with_options,
)
from fxpipe.cli.output import bar, err, examples, print_json, writable
from fxpipe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from fxpipe.planner.plan import Plan

__all__ = ["memory_bytes", "plan", "plan_examples", "token_count"]

plan_examples = examples(
    "fxpipe plan gpt --ranks 4 --batch-size 16 --hardware cpu-core",
    "fxpipe plan llama3-8b --gpus 64 --hardware H100 --tokens 1T --price 2.5",
    "fxpipe plan 'hf:llama?num_hidden_layers=8' -p 8 --batch-size 16 --seq 512 "
    "--dtype bfloat16 --hardware A100 --schedule 1F1B",
    "fxpipe plan gpt -p 2 --batch-size 8 --memory 2GB --schedule 1F1B --json",
)


def complete_hardware(incomplete: str) -> list[str]:
    """Presets whose name starts so, for the shell's completion."""
    from fxpipe.planner.cost.presets import HARDWARE

    return [name for name in HARDWARE if name.lower().startswith(incomplete.lower())]


_BATCH = (
    "Rows of one step, over all replicas; 32, or 4M tokens of a known model (16M from 100B on)."
)
_GROUP = "Sizes that may be chosen, with commas; auto tries some for models without weights."
_SCHEDULE = "A schedule that may be chosen. May be repeated; all otherwise."
_CHECKPOINTING = "What may be chosen: none, expansions, selective, alternate, 1/2, full, ..."
_KERNELS = "eager, compiled, asynchronous (compiled, tensor groups too), fused or overlapped."
_OBJECTIVE = "What is to be short: step, one by itself, or period, from step to step."
_HARDWARE = "A preset (A100, H100, H200, B200, GB200, MI300X, ...) or a .json or .toml file."


@dataclass(frozen=True)
class _Asked:
    """What is to be planned; None and "auto" leave the choice to the planner."""

    model: ModelName
    ranks: int = typer.Option(
        4, "--ranks", "--gpus", "-p", min=1, help="Number of ranks (devices)."
    )
    batch_size: int | None = typer.Option(None, min=1, help=_BATCH)
    hardware: str = typer.Option(
        "H100", "--hardware", "-w", help=_HARDWARE, autocompletion=complete_hardware
    )
    memory: str | None = typer.Option(
        None, help="What a rank may hold, such as 40GB; else the device's."
    )
    schedules: list[str] | None = typer.Option(
        None, "--schedule", help=_SCHEDULE, autocompletion=complete_schedule
    )
    microbatch_size: str | None = typer.Option(None, help="Sizes that may be chosen, with commas.")
    data_parallel: int | None = typer.Option(None, min=1, help="Number of replicas.")
    stages_per_rank: str | None = typer.Option(
        None, help="Numbers that may be chosen, with commas."
    )
    checkpointing: str = typer.Option("none,selective,full", help=_CHECKPOINTING)
    offload: int = typer.Option(2, min=0, help="Actions after which host memory pays; 0: never.")
    tensor_parallel: str = typer.Option("auto", help=_GROUP)
    context_parallel: str = typer.Option("auto", help=_GROUP)
    expert_parallel: str = typer.Option("auto", help=_GROUP)
    sharding: str = typer.Option("auto", help="Stages of ZeRO that may be chosen, 0 to 3, or auto.")
    optimizer: str = typer.Option(
        "adamw-master", help="none, sgd, momentum, adam, adamw, adamw-master, -half or -lean."
    )
    kernels: str = typer.Option("eager", help=_KERNELS)
    float8: bool = typer.Option(False, "--float8", help="Products of blocks in 8 bits.")
    tokens: str | None = typer.Option(None, help="Say what so many take, such as 15T.")
    price: float | None = typer.Option(None, min=0, help="Dollars per GPU and hour.")
    what_if: bool = typer.Option(
        False, "--what-if", help="Plan again with other GPUs, network, memory, sequence."
    )
    what_if_picture: Path | None = typer.Option(
        None, help="Draw that, .svg, .png, .pdf.", show_default=False
    )
    profiled: bool = typer.Option(
        False, "--profile", help="Measure the model's parts on this machine's CPU first."
    )
    improve: bool = typer.Option(
        False, "--improve", help="Search for a better order than the schedule's."
    )
    objective: str = typer.Option("step", help=_OBJECTIVE)
    top: int = typer.Option(10, min=1, help="How many options to list.")
    seq: Seq = None
    inputs: InputsName = None
    dtype: str | None = typer.Option(
        None, help="Of the weights; float32, or bfloat16 for a known model."
    )
    meta: Meta = None
    save: Path | None = typer.Option(
        None, "--out", "-o", help="Write the plan, .json, to build from."
    )
    report: Path | None = typer.Option(None, help="Write a report, .html.")
    as_json: AsJson = False


@with_options
def plan(asked: _Asked) -> None:
    """Plan a training run: the split, the schedule, the memory and the time of a step.

    Nothing is trained and no device is needed. Options are listed from the quickest on, with
    the reason why each lost.
    """
    wanted = None if asked.tokens is None else token_count(asked.tokens)
    from fxpipe.viz.svg import PICTURES

    for path, endings in (
        (asked.save, (".json",)), (asked.report, (".html",)), (asked.what_if_picture, PICTURES),
    ):  # fmt: skip
        if path is not None and path.suffix.lower() not in endings:
            raise InputError(f"this is written as {' or '.join(endings)}, but got {path}")
    if asked.price is not None and wanted is None:
        raise InputError("--price needs --tokens: dollars are those of a whole training run")
    found = _planned(asked)
    from fxpipe.planner.plan_report import draw_what_if, what_if_rows
    from fxpipe.planner.plan_text import cost_lines, plan_text
    from fxpipe.planner.what_if import what_if
    from fxpipe.text import aligned

    rows = what_if(found) if asked.what_if or asked.what_if_picture is not None else []
    table = what_if_rows(rows, wanted, asked.price) if rows else []
    costs = [] if wanted is None else cost_lines(found, wanted, asked.price)
    written = [] if asked.save is None else [found.save(asked.save)]
    if asked.report is not None:
        kept = found.report(asked.report, tokens=wanted, price=asked.price, what_if=rows)
        written.append(kept)
    if asked.what_if_picture is not None:
        written.append(draw_what_if(rows, asked.what_if_picture))
    if asked.as_json:
        print_json(
            {**_json(found, asked.model, asked.top, written), "costs": costs, "what_if": table}
        )
        return
    typer.echo(plan_text(found, others=asked.top))
    if costs:
        typer.echo("\n" + "\n".join(costs))
    if table:
        typer.echo("\n" + "\n".join(aligned(table, left=(0, len(table[0]) - 1))))
    for path in written:
        typer.echo(f"wrote {path}")


def _planned(asked: _Asked) -> Plan:
    """The plan of what is asked for; files that will be written are tried first."""
    memory = None if asked.memory is None else memory_bytes(asked.memory)
    sizes = _several("--microbatch-size", asked.microbatch_size)
    per_rank = _several("--stages-per-rank", asked.stages_per_rank)
    from fxpipe.cli.named.models import ModelRequest, resolve
    from fxpipe.planner.known_models import KNOWN
    from fxpipe.planner.plan import plan as make_plan
    from fxpipe.planner.search.profile import profile

    is_known = asked.model.lower() in KNOWN
    dtype = asked.dtype or ("bfloat16" if is_known else "float32")
    named = resolve(ModelRequest(asked.model, seq=asked.seq, inputs=asked.inputs, dtype=dtype))
    args, kwargs = named.inputs(2)
    on_meta = named.is_built_on_meta_by_default if asked.meta is None else asked.meta
    module = named.build(meta=on_meta)
    batch_size = asked.batch_size
    if batch_size is None:
        batch_size = _usual_batch(module, args[0].shape[1]) if is_known else 32
    tried = _tried(module, asked.ranks, args) if on_meta else {}
    chosen: dict[str, Any] = {
        name: _choice(name, getattr(asked, name), tried.get(name)) for name in _GROUPS
    }
    chosen["checkpointing"] = [part.strip() for part in asked.checkpointing.split(",")]
    for path in (asked.save, asked.report, asked.what_if_picture):
        if path is not None:
            writable(path)  # said before the plan is made, not after
    measured = None
    if asked.profiled:
        with _bar("measuring") as tell:
            measured = profile(module, args, example_kwargs=kwargs, progress=tell)
    with _bar("planning") as tell:
        return make_plan(
            module,
            args,
            asked.hardware,
            asked.ranks,
            batch_size,
            memory,
            example_kwargs=kwargs,
            schedules=asked.schedules,
            microbatch_sizes=[1, 2, 4] if is_known and sizes is None else sizes,
            data_parallel=asked.data_parallel,
            stages_per_rank=per_rank,
            offload=asked.offload,
            optimizer=asked.optimizer,
            kernels=asked.kernels,  # type: ignore[arg-type]
            float8=asked.float8,
            expert_groups=KNOWN[asked.model.lower()].expert_groups if is_known else None,
            profile=measured,
            improve=asked.improve,
            objective=asked.objective,  # type: ignore[arg-type]
            progress=tell,
            **chosen,
        )


def memory_bytes(text: str) -> float:
    """Bytes from a text such as 40GB, 512MiB or 1e9."""
    base = 1024 if text.strip().lower().removesuffix("b").endswith("i") else 1000
    return _amount(text, r"([kMGT]?)i?B?", " kmgt", base, "--memory", "40GB, 512MiB or 1e9")


def token_count(text: str) -> float:
    """A number of tokens from a text such as 15T, 300B or 1e12."""
    return _amount(text, r"([kMBT]?)", " kmbt", 1000, "--tokens", "15T, 300B or 1e12")


def _amount(
    text: str, unit: str, powers: str, base: int, option: str, examples_of_it: str
) -> float:
    """A number with a unit.

    Raises:
        InputError: it is none, or not above 0.
    """
    match = re.fullmatch(rf"\s*(\d+\.?\d*(?:e\d+)?)\s*{unit}\s*", text, re.IGNORECASE)
    value = 0.0
    if match is not None:
        value = float(match[1]) * float(base) ** powers.index(match[2].lower() or " ")
    if value <= 0:
        raise InputError(f"{option} is an amount such as {examples_of_it}; got {text!r}")
    return value


def _usual_batch(module: nn.Module, length: int) -> int:
    """Rows of a step of 4M tokens, or 16M for a large model."""
    large = sum(p.numel() for p in module.parameters()) > 100e9
    return max((16 if large else 4) * 2**20 // length, 1)


def _tried(module: nn.Module, ranks: int, args: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Sizes to try for a model without weights."""
    length = args[0].shape[1] if args and args[0].dim() > 1 else 0
    has_experts = any(".experts." in f".{key}" for key, _ in module.named_parameters())
    tries = {
        "tensor_parallel": (1, 2, 4, 8),
        "context_parallel": (1, 2, 4, 8) if length > 16384 else (1,),
        "expert_parallel": (8, 16, 32, 64) if has_experts else (1,),
    }
    fitting = {name: tuple(n for n in found if ranks % n == 0) for name, found in tries.items()}
    return {name: found or (1,) for name, found in fitting.items()} | {"sharding": (1, 3)}


_GROUPS = ("tensor_parallel", "context_parallel", "expert_parallel", "sharding")


def _several(option: str, text: str | None) -> list[int] | None:
    return None if text is None else numbers(option, text)


def _choice(name: str, text: str, auto: tuple[int, ...] | None) -> tuple[int, ...]:
    least = 0 if name == "sharding" else 1
    if text.strip().lower() == "auto":
        return auto or (least,)
    return tuple(numbers(f"--{name.replace('_', '-')}", text, least=least))


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    with bar(err()) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _json(found: Plan, model: str, top: int, written: list[Path]) -> dict[str, Any]:
    return {
        "model": model,
        "hardware": found.hardware.name,
        "num_ranks": found.num_ranks,
        "batch_size": found.batch_size,
        "memory_limit": found.memory_limit,
        "num_candidates": found.num_candidates,
        "tokens_per_second_per_rank": found.tokens_per_second,
        "utilization": found.utilization,
        "error": found.hardware.error,
        "options": found.rows()[:top],
        "stages": [
            {
                "rank": found.best.placement.stage_to_rank[index],
                "modules": list(found.best.modules[index]),
                **asdict(stage),
            }
            for index, stage in enumerate(found.best.stages)
        ],
        "written": [str(path) for path in written],
    }
