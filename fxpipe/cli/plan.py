"""`fxpipe plan`: how to split a model, which schedule, does it fit, how fast will it be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxpipe.cli.options import (
    AsJson,
    InputsName,
    Meta,
    ModelName,
    Seq,
    complete_schedule,
    numbers,
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
_CHECKPOINTING = "What may be chosen: none, selective, alternate, 1/2, full, ..."
_KERNELS = "eager, compiled, asynchronous (compiled, tensor groups too), fused or overlapped."
_HARDWARE = "A preset (A100, H100, H200, B200, GB200, MI300X, ...) or a .json or .toml file."

_Hardware = Annotated[
    str, typer.Option("--hardware", "-w", help=_HARDWARE, autocompletion=complete_hardware)
]
_Ranks = Annotated[
    int, typer.Option("--ranks", "--gpus", "-p", min=1, help="Number of ranks (devices).")
]
_BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help=_BATCH)]
_Tensor = Annotated[str, typer.Option("--tensor-parallel", help=_GROUP)]
_Context = Annotated[str, typer.Option("--context-parallel", help=_GROUP)]
_Expert = Annotated[str, typer.Option("--expert-parallel", help=_GROUP)]
_Sharding = Annotated[
    str, typer.Option("--sharding", help="Stages of ZeRO that may be chosen, 0 to 3, or auto.")
]
_Kernels = Annotated[str, typer.Option("--kernels", help=_KERNELS)]
_Float8 = Annotated[bool, typer.Option("--float8", help="Products of blocks in 8 bits.")]
_Tokens = Annotated[str | None, typer.Option(help="Say what so many take, such as 15T.")]
_Price = Annotated[float | None, typer.Option(min=0, help="Dollars per GPU and hour.")]
_WhatIf = Annotated[
    bool, typer.Option("--what-if", help="Plan again with other GPUs, network, memory, sequence.")
]
_WhatIfPicture = Annotated[
    Path | None,
    typer.Option("--what-if-picture", help="Draw that, .svg, .png, .pdf.", show_default=False),
]
_DtypeOrNone = Annotated[
    str | None, typer.Option(help="Of the weights; float32, or bfloat16 for a known model.")
]
_Memory = Annotated[
    str | None, typer.Option(help="What a rank may hold, such as 40GB; else the device's.")
]
_Schedules = Annotated[
    list[str] | None,
    typer.Option("--schedule", help=_SCHEDULE, autocompletion=complete_schedule),
]
_Sizes = Annotated[
    str | None, typer.Option("--microbatch-size", help="Sizes that may be chosen, with commas.")
]
_Width = Annotated[int | None, typer.Option("--data-parallel", min=1, help="Number of replicas.")]
_PerRank = Annotated[
    str | None, typer.Option("--stages-per-rank", help="Numbers that may be chosen, with commas.")
]
_Checkpointing = Annotated[str, typer.Option("--checkpointing", help=_CHECKPOINTING)]
_Offload = Annotated[
    int, typer.Option("--offload", min=0, help="Actions after which host memory pays; 0: never.")
]
_Optimizer = Annotated[
    str, typer.Option("--optimizer", help="none, sgd, momentum, adam, adamw or adamw-master.")
]
_Profile = Annotated[
    bool, typer.Option("--profile", help="Measure the model's parts on this machine's CPU first.")
]
_Improve = Annotated[
    bool, typer.Option("--improve", help="Search for a better order than the schedule's.")
]
_Top = Annotated[int, typer.Option("--top", min=1, help="How many options to list.")]
_Save = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write the plan, .json, to build from.")
]
_Report = Annotated[Path | None, typer.Option("--report", help="Write a report, .html.")]


def plan(
    model: ModelName,
    ranks: _Ranks = 4,
    batch_size: _BatchSize = None,
    hardware: _Hardware = "H100",
    memory: _Memory = None,
    schedules: _Schedules = None,
    microbatch_size: _Sizes = None,
    data_parallel: _Width = None,
    stages_per_rank: _PerRank = None,
    checkpointing: _Checkpointing = "none,selective,full",
    offload: _Offload = 2,
    tensor_parallel: _Tensor = "auto",
    context_parallel: _Context = "auto",
    expert_parallel: _Expert = "auto",
    sharding: _Sharding = "auto",
    optimizer: _Optimizer = "adamw-master",
    kernels: _Kernels = "eager",
    float8: _Float8 = False,
    tokens: _Tokens = None,
    price: _Price = None,
    what_if: _WhatIf = False,
    what_if_picture: _WhatIfPicture = None,
    profiled: _Profile = False,
    improve: _Improve = False,
    top: _Top = 10,
    seq: Seq = None,
    inputs: InputsName = None,
    dtype: _DtypeOrNone = None,
    meta: Meta = None,
    save: _Save = None,
    report: _Report = None,
    as_json: AsJson = False,
) -> None:
    """Plan a training run: the split, the schedule, the memory and the time of a step.

    Nothing is trained and no device is needed. Options are listed from the quickest on, with
    the reason why each lost.
    """
    limit = None if memory is None else memory_bytes(memory)
    sizes = None if microbatch_size is None else numbers("--microbatch-size", microbatch_size)
    per_rank = None
    if stages_per_rank is not None:
        per_rank = numbers("--stages-per-rank", stages_per_rank)
    wanted = None if tokens is None else token_count(tokens)
    for path, ending in ((save, ".json"), (report, ".html")):
        if path is not None and path.suffix.lower() != ending:
            raise InputError(f"a plan is written as {ending} here, but got {path}")
    from fxpipe.cli.named.models import ModelRequest, resolve
    from fxpipe.planner.known_models import KNOWN
    from fxpipe.planner.plan import plan as make_plan
    from fxpipe.planner.plan import what_if as ask
    from fxpipe.planner.plan_report import draw_what_if
    from fxpipe.planner.plan_text import cost_lines, plan_text, what_if_rows
    from fxpipe.planner.search.profile import profile
    from fxpipe.text import aligned

    is_known = model.lower() in KNOWN
    kind = dtype or ("bfloat16" if is_known else "float32")
    named = resolve(ModelRequest(model, seq=seq, inputs=inputs, dtype=kind))
    args, kwargs = named.inputs(2)
    on_meta = named.is_built_on_meta_by_default if meta is None else meta
    module = named.build(meta=on_meta)
    if is_known and sizes is None:
        sizes = [1, 2, 4]
    if batch_size is None:
        batch_size = _usual_batch(module, args[0].shape[1]) if is_known else 32
    asked = {
        "tensor_parallel": tensor_parallel,
        "context_parallel": context_parallel,
        "expert_parallel": expert_parallel,
        "sharding": sharding,
    }
    tried = _tried(module, ranks, args) if on_meta else {}
    chosen: dict[str, Any] = {"checkpointing": [part.strip() for part in checkpointing.split(",")]}
    chosen |= {name: _choice(name, text, tried.get(name)) for name, text in asked.items()}
    for path in (save, report, what_if_picture):
        if path is not None:
            writable(path)  # said before the plan is made, not after
    measured = None
    if profiled:
        with _bar("measuring") as tell:
            measured = profile(module, args, example_kwargs=kwargs, progress=tell)
    with _bar("planning") as tell:
        found = make_plan(
            module,
            args,
            hardware,
            ranks,
            batch_size,
            limit,
            example_kwargs=kwargs,
            schedules=schedules,
            microbatch_sizes=sizes,
            data_parallel=data_parallel,
            stages_per_rank=per_rank,
            offload=offload,
            optimizer=optimizer,
            kernels=kernels,  # type: ignore[arg-type]
            float8=float8,
            expert_groups=KNOWN[model.lower()].expert_groups if is_known else None,
            profile=measured,
            improve=improve,
            progress=tell,
            **chosen,
        )
    written = [] if save is None else [found.save(save)]
    if report is not None:
        written.append(found.report(report))
    if as_json:
        print_json(_json(found, model, top, written))
        return
    typer.echo(plan_text(found, others=top))
    if wanted is not None:
        typer.echo("\n" + "\n".join(cost_lines(found, wanted, price)))
    if what_if or what_if_picture is not None:
        rows = ask(found)
        typer.echo("\n" + "\n".join(aligned(what_if_rows(rows), left=(0, 4))))
        if what_if_picture is not None:
            written.append(draw_what_if(rows, what_if_picture))
    for path in written:
        typer.echo(f"wrote {path}")


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
