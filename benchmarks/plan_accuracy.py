"""Predicted against measured: step times on two gloo processes, memory of each rank in one.

    python -m benchmarks.plan_accuracy [--rounds 5]
    python -m benchmarks.plan_accuracy --memory

The second prints, for each model and schedule on four ranks, the fullest rank's predicted and
measured bytes (storages that its actions made and nobody has freed) and the worst error of a rank.

In each round both processes profile the model's parts at the same time and run one step of
every option of the plan, so that a change of the machine's load meets all alike. A step takes as
long as on its slower rank; times are means over the rounds. Printed: the error of each
prediction, the median error, and how far the first choice by the measured parts is from the
best measured option.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import models
from benchmarks.ports import free_port, join
from fxpipe.planner.cost.measured import Measured, Profile
from fxpipe.planner.cost.training import Training
from fxpipe.planner.plan import Plan, plan
from fxpipe.planner.search.estimate import rank_memory
from fxpipe.planner.search.profile import profile
from fxpipe.planner.search.search import Pricing, Search
from fxpipe.program import Link
from fxpipe.runtime.wire.measure_link import measure_link

__all__ = ["main"]

MICROBATCH, COUNT = 2, 4
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 8, "width": 192, "heads": 4, "length": 64, "vocab": 512},
    "llama": {"layers": 8, "width": 192, "feed": 512, "heads": 4, "vocab": 512},
    "vit": {"layers": 8, "width": 192, "image": 32},
}
LENGTH = {"gpt": {"length": 64}, "llama": {"length": 64}, "vit": {"image": 32}}


def _example(name: str, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found: tuple[tuple[Any, ...], dict[str, Any]] = models.load(name).example_inputs(
        rows, **LENGTH.get(name, {})
    )
    return found


def _build(name: str) -> nn.Module:
    built: nn.Module = models.load(name).build(**CASES[name])
    return built


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    parts = list(output.values()) if isinstance(output, dict) else [output]
    means: list[torch.Tensor] = [
        part.float().square().mean() for part in parts if isinstance(part, torch.Tensor)
    ]
    return torch.stack(means).sum()


def _shared(own: list[Profile], link: Link) -> Profile:
    """The mean of what both processes measured in all rounds, while both were busy.

    The mean, since a part that others interrupt now and then takes longer on average, and so
    does the step that consists of it.
    """
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, [found.to_json() for found in own])
    every = [Profile.from_json(text) for texts in gathered for text in texts]

    def mean(node: str, size: int) -> Measured:
        found = [p.parts[node][size] for p in every]
        return Measured(
            statistics.fmean(m.forward for m in found),
            statistics.fmean(m.backward_input for m in found),
            statistics.fmean(m.backward_weight for m in found),
        )

    first = every[0]
    parts = {
        node: {size: mean(node, size) for size in found} for node, found in first.parts.items()
    }
    return Profile(first.fingerprint, first.device, first.opened, parts, link)


def _options(name: str, model: nn.Module) -> Plan:
    """All schedules, with the model cut by estimated costs."""
    args, kwargs = _example(name, MICROBATCH)
    return plan(
        model,
        args,
        "cpu core",
        2,
        MICROBATCH * COUNT,
        64e9,
        example_kwargs=kwargs,
        microbatch_sizes=(MICROBATCH,),
        data_parallel=1,
        stages_per_rank=(1, 2),
        checkpointing="none",
        optimizer="none",
    )


def _predicted(found: Plan, index: int, measured: Profile) -> float:
    """The time of an option with the measured times of its parts."""
    option, subject = found.options[index], found.subject
    assert subject is not None
    stage_of = {name: stage for stage, names in enumerate(option.nodes) for name in names}
    pricing = Pricing(
        subject.costs,
        subject.sizes,
        # Transfers are posted ahead and go on beside compute.
        replace(measured.hardware("cpu core"), overlaps_transfers=True),
        Training("none"),
        64e9,
        stage_of,
        profile=measured,
    )
    return Search(pricing).price(option.candidate).prediction.makespan


def _measure(name: str, rounds: int) -> list[dict[str, Any]]:
    model = _build(name)
    found = _options(name, model)
    example = _example(name, MICROBATCH)
    args, kwargs = _example(name, MICROBATCH * COUNT)
    target = torch.zeros(MICROBATCH * COUNT)
    runs = [
        found.build(choice=choice, loss_fn=_loss).schedule for choice in range(len(found.options))
    ]
    profiles, taken, links = [], [[] for _ in runs], []
    for turn in range(rounds + 1):
        dist.barrier()
        links.append(measure_link(repeats=5))
        profiles.append(
            profile(
                model, example[0], example_kwargs=example[1], batch_sizes=(MICROBATCH,),
                repeats=6, average=statistics.fmean, cache=False,
            )
        )  # fmt: skip
        for times, run in zip(taken, runs, strict=True):
            dist.barrier()
            start = time.perf_counter()
            run.step(*args, target=target, return_outputs=False, **kwargs)
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:
                times.append(seconds.item())
    latency = statistics.median(link.latency for link in links)
    link = Link(latency, statistics.median(link.bytes_per_time for link in links))
    measured = _shared(profiles[1:], link)
    return [
        {
            "model": name,
            "latency": link.latency,
            "option": str(found.options[choice].candidate),
            "predicted": _predicted(found, choice, measured),
            "measured": statistics.fmean(times),
        }
        for choice, times in enumerate(taken)
    ]


def _memory(name: str) -> list[dict[str, Any]]:
    """What each rank of each schedule holds at its fullest, as planned and in a real step."""
    from tests.planner.tracked import RankMemory

    model = models.load(name).build()
    args, kwargs = models.load(name).example_inputs(MICROBATCH)
    found = plan(
        model, args, "cpu core", 4, 8 * MICROBATCH, 64e9, example_kwargs=kwargs, offload=0,
        microbatch_sizes=MICROBATCH, data_parallel=1, stages_per_rank=(1, 2), checkpointing="none",
        optimizer="none", loss=False,
    )  # fmt: skip
    args, kwargs = models.load(name).example_inputs(8 * MICROBATCH)
    target = torch.zeros(8 * MICROBATCH)
    rows: list[dict[str, Any]] = []
    for choice, option in enumerate(found.options):
        run = found.build(choice=choice, loss_fn=_loss).schedule
        run.record_timeline()
        given = [v for v in (*args, *kwargs.values(), target) if isinstance(v, torch.Tensor)]
        for _ in range(2):  # the first step makes what stays
            model.zero_grad(set_to_none=True)
            with RankMemory(run, [*model.parameters(), *model.buffers(), *given]) as memory:
                run.step(*args, target=target, return_outputs=False, **kwargs)
        model.zero_grad(set_to_none=True)
        held = rank_memory(
            run.program, run.timeline.spans, option.stages, option.edge_bytes, copies=False
        )
        predicted = [rank.total - rank.weights for rank in held]
        errors = [a / b - 1 for a, b in zip(predicted, memory.peak, strict=True)]
        rows.append(
            {
                "model": name,
                "option": str(option.candidate),
                "predicted": max(predicted),
                "measured": max(memory.peak),
                "fullest": max(predicted) / max(memory.peak) - 1,
                "errors": errors,
            }
        )
    return rows


def _print_memory(names: Sequence[str]) -> None:
    every: list[float] = []
    for name in names:
        rows = _memory(name)
        print(f"\n{name}: predicted kB, measured kB, error, worst of the ranks")
        for row in rows:
            worst = max(row["errors"], key=abs)
            print(
                f"  {row['predicted'] / 1e3:8.1f} {row['measured'] / 1e3:8.1f} "
                f"{row['fullest']:+7.1%} {worst:+7.1%}  {row['option']}"
            )
        errors = [error for row in rows for error in row["errors"]]
        every += errors
        fullest = [row["fullest"] for row in rows]
        print(
            f"  fullest rank {min(fullest):+.1%} to {max(fullest):+.1%}; ranks "
            f"{min(errors):+.1%} to {max(errors):+.1%}, median "
            f"{statistics.median(map(abs, errors)):.1%}"
        )
    print(f"\nmedian error {statistics.median(map(abs, every)):.1%} over {len(every)} ranks")


def _serve(rank: int, port: int, names: Sequence[str], rounds: int, answers: Any) -> None:
    join(rank, port)
    torch.manual_seed(0)
    rows = [row for name in names for row in _measure(name, rounds)]
    if rank == 0:
        answers.put(json.dumps(rows))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=models.NAMES)
    parser.add_argument("--memory", action="store_true", help="bytes per rank instead of times")
    options = parser.parse_args(argv)
    if options.memory:
        _print_memory(options.models or models.NAMES)
        return 0
    names = options.models or list(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"no times for {', '.join(unknown)}; there are {', '.join(CASES)}")
    port = free_port()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(
            target=_serve, args=(rank, port, names, options.rounds, answers), daemon=True
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        rows = json.loads(answers.get(timeout=900))
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    _print(rows)
    return 0


def _print(rows: list[dict[str, Any]]) -> None:
    errors = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        print(f"\n{name}: predicted ms, measured ms, error")
        for row in own:
            error = row["predicted"] / row["measured"] - 1
            errors.append(abs(error))
            print(
                f"  {1e3 * row['predicted']:8.1f} {1e3 * row['measured']:8.1f} {error:+7.1%}"
                f"  {row['option']}"
            )
        best = min(row["measured"] for row in own)
        first = min(own, key=lambda row: row["predicted"])["measured"]
        print(f"  first choice: {first / best - 1:.1%} above the best measured")
    print(f"\nlatency {1e6 * rows[0]['latency']:.0f} us")
    print(f"median error {statistics.median(errors):.1%} over {len(errors)} options")


if __name__ == "__main__":
    raise SystemExit(main())
