"""Time whole training steps on two gloo processes, beside torch.distributed.pipelining.

    python -m benchmarks.step_overhead            # tiny model: the cost of running actions
    python -m benchmarks.step_overhead --heavy    # compute-bound model
    python -m benchmarks.step_overhead --alone    # one rank that has every stage
    python -m benchmarks.step_overhead --first    # the schedule and its first step

Both packages run the same modules under the same schedule in the same processes, in
turns, so that whatever else the machine does hits both. Only ratios mean anything.
(`--first` starts new processes for each package: what one imports the other would find.)
"""

import argparse
import importlib
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from benchmarks.ports import free_port, join

SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


class Block(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def stages_of(schedule: str, rank: int, *, is_alone: bool) -> tuple[list[int], int]:
    if is_alone:
        return ([0], 1) if schedule in ("GPipe", "1F1B") else ([0, 1], 2)
    if schedule in ("GPipe", "1F1B"):
        return [rank], 2
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 3 - rank], 4
    return [rank, rank + 2], 4


def make(package: Any, schedule: str, rank: int, options: argparse.Namespace) -> Any:
    """A function that runs one step with `package`."""
    indices, num_stages = stages_of(schedule, rank, is_alone=options.alone)
    torch.manual_seed(0)
    modules = [Block(options.width, options.layers) for _ in range(num_stages)]
    stages = [
        package.PipelineStage(modules[i], i, num_stages, torch.device("cpu")) for i in indices
    ]
    from_name = package.schedules.get_schedule_class(schedule)
    made = from_name(
        stages[0] if schedule in ("GPipe", "1F1B") else stages,
        options.microbatches,
        loss_fn=mse,
    )
    x = torch.randn(options.rows * options.microbatches, options.width)

    def step() -> None:
        args = (x,) if 0 in indices else ()
        kwargs = {"target": x} if num_stages - 1 in indices else {}
        made.step(*args, return_outputs=False, **kwargs)
        for i in indices:
            modules[i].zero_grad()

    return step


def measure(step: Any, options: argparse.Namespace) -> float:
    dist.barrier()
    start = time.perf_counter()
    cpu = time.process_time()
    for _ in range(options.steps):
        step()
    took = time.process_time() - cpu if options.cpu else time.perf_counter() - start
    return took / options.steps


def first(rank: int, port: int, package: str, answers: Any, options: argparse.Namespace) -> None:
    """Seconds and megabytes from the import of `package` to the end of its first step."""
    join(rank, port, num_ranks=1 if options.alone else 2)
    dist.barrier()
    begin, memory = time.perf_counter(), resident()
    imported = importlib.import_module(package)
    importlib.import_module(f"{package}.schedules")
    ready = time.perf_counter()
    make(imported, options.schedules[0], rank, options)()
    if rank == 0:
        end = time.perf_counter()
        answers.put((ready - begin, end - ready, resident() - memory))
    dist.barrier()
    dist.destroy_process_group()


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def compare_first(options: argparse.Namespace) -> None:
    packages = {"torch": "torch.distributed.pipelining", "fxpipe": "fxpipe"}
    print(f"{options.schedules[0]:24} {'import s':>9} {'first step s':>13} {'MB':>6}")
    for name, package in packages.items():
        answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
        found = []
        for _ in range(options.rounds):
            nprocs = 1 if options.alone else 2
            work = (free_port(), package, answers, options)
            torch.multiprocessing.spawn(first, work, nprocs=nprocs)
            found.append(answers.get())
        ready, step, memory = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:24} {ready:9.2f} {step:13.2f} {memory:6.0f}", flush=True)


def run(rank: int, port: int, options: argparse.Namespace) -> None:
    join(rank, port, num_ranks=1 if options.alone else 2)
    from torch.distributed import pipelining as peer

    import fxpipe

    if rank == 0:
        what = "CPU time" if options.cpu else "wall time"
        print(f"{'schedule':24} {'torch ms':>9} {'fxpipe ms':>10} {'ratio':>6}   ({what} per step)")
    for schedule in options.schedules:
        steps = {name: make(package, schedule, rank, options)
                 for name, package in (("torch", peer), ("fxpipe", fxpipe))}  # fmt: skip
        for step in steps.values():
            for _ in range(3):
                step()
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                found[name].append(measure(step, options))
        theirs, ours = (statistics.median(found[name]) for name in ("torch", "fxpipe"))
        if rank == 0:
            print(
                f"{schedule:24} {theirs * 1e3:9.2f} {ours * 1e3:10.2f} {ours / theirs:6.2f}",
                flush=True,
            )
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heavy", action="store_true", help="compute-bound sizes")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of rank 0 instead of wall time"
    )
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--alone", action="store_true", help="one rank that has every stage")
    parser.add_argument("--first", action="store_true", help="the first step in new processes")
    options = parser.parse_args()
    options.width, options.layers, options.rows = (512, 4, 64) if options.heavy else (16, 1, 2)
    if options.first:
        compare_first(options)
    else:
        nprocs = 1 if options.alone else 2
        torch.multiprocessing.spawn(run, (free_port(), options), nprocs=nprocs)


if __name__ == "__main__":
    main()
