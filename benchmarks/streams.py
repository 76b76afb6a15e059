"""Measure what communicators like NCCL's ask of a step, over their emulation on the CPU.

    python -m benchmarks.streams

Prints what a step holds, waits for and asks, and how long it takes if all messages of a rank share
a queue, beside a queue for each direction: simulated, and measured with stages that
sleep. Sleeping needs no core, so the ratios hold on a small machine, if it is not busy.
"""

import os
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import get_schedule_class
from fxpipe.program import lower, simulate
from fxpipe.program.costs import Link, StageCost, StageCosts
from fxpipe.program.generators import SCHEDULES
from fxpipe.runtime.control.store import Store
from fxpipe.text import aligned
from tests.backends import nccl_like
from tests.distributed.bodies import layout, mse, rand, stages_of
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_held import most_sends

RANKS, MICROBATCHES = 3, 12
FORWARD = 0.1  # seconds; a backward takes twice as long
LATENCY = 0.02  # at most, of a forward
LATENCIES = (LATENCY, 0.3, 0.5)  # simulated
SIZES = ((3, 12), (8, 32))  # ranks and microbatches that are simulated
MODELS = ("rank", "direction")
TIMED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class _Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Sleep.apply(self.linear(x), self.seconds)
        return made


def steps(rank: int, schedule: str, count: int) -> dict[str, float]:
    """What steps in steady state take over both models, in turn, and what they ask for."""
    os.environ["NCCL_LIKE_DELAY"] = str(LATENCY * FORWARD)
    nccl_like.register()
    indices, num_stages = layout(schedule, rank, RANKS)
    modules = [_Slow(FORWARD * RANKS / num_stages) for _ in range(num_stages)]
    x = rand(MICROBATCHES * 2, 8)
    made = {}
    for model in MODELS:
        group = dist.new_group(backend=f"nccl_{model}")
        nccl_like.instances()  # forget it: fxpipe makes its own
        stages = stages_of(modules, indices, group)
        made[model] = get_schedule_class(schedule)(stages, MICROBATCHES, loss_fn=mse)
        made[model].step(x, target=x)
    own = nccl_like.instances()
    controls: list[Any] = [one._session._control for one in made.values()]
    exchanges = sum(control._sequence for control in controls)
    took: dict[str, list[float]] = {model: [] for model in MODELS}
    with (
        mock.patch.object(Store, "ask", autospec=True, side_effect=Store.ask) as asked,
        mock.patch.object(Store, "post", autospec=True, side_effect=Store.post) as posted,
    ):
        for _ in range(count):
            for model in MODELS:
                begin = time.perf_counter()
                made[model].step(x, target=x)
                took[model].append(time.perf_counter() - begin)
    num_steps, seconds = count * len(MODELS), sum(map(sum, took.values()))
    return {
        **{model: min(times) for model, times in took.items()},
        "exchanges of words": (sum(c._sequence for c in controls) - exchanges) / num_steps,
        "host waits for messages": sum(group.host_waits for group in own) / num_steps,
        "store requests per second": (asked.call_count + posted.call_count) / seconds,
    }


def simulated(
    schedule: str, num_ranks: int, num_microbatches: int, latency: float, streams: Any
) -> float:
    info = SCHEDULES[schedule]
    num_stages = num_ranks if info.stages_per_rank[1] == 1 else 2 * num_ranks
    share = num_ranks / num_stages
    cost = StageCost(forward=share, backward_input=share, backward_weight=share)
    costs = StageCosts((cost,) * num_stages, link=Link(latency=latency * share))
    program = info.generator(num_ranks, num_stages, num_microbatches)
    return simulate(lower(program, costs=costs, streams="rank"), costs, streams=streams).makespan


def main() -> None:
    from benchmarks import streams as me  # the ranks find the bodies there

    held = run_on_ranks(RANKS, most_sends, "1F1B", RANKS, 2, backend="nccl_rank")
    rows = [["what, per rank and step", "value"]]
    rows.append(["sent messages kept at most, 1F1B, 8 microbatches", " ".join(map(str, held))])
    found = {schedule: run_on_ranks(RANKS, me.steps, schedule, 3) for schedule in TIMED}
    every = [one for ranks in found.values() for one in ranks]
    for what in list(every[0])[len(MODELS) :]:
        rows += [[what, f"{max(one[what] for one in every):.1f}"]]
    print("\n".join(aligned(rows, left=(0,), rule=True)), end="\n\n")
    head = [f"{ranks} ranks, {latency}" for latency in LATENCIES for ranks, _ in SIZES]
    rows = [["one queue per rank / one per direction", *head, "measured"]]
    for schedule in TIMED:
        ratios = []
        for place in [(*size, latency) for latency in LATENCIES for size in SIZES]:
            one, many = (simulated(schedule, *place, model) for model in MODELS)
            ratios.append(one / many)
        one, many = (max(ranks[model] for ranks in found[schedule]) for model in MODELS)
        rows.append([schedule, *(f"{ratio:.3f}" for ratio in (*ratios, one / many))])
    print("\n".join(aligned(rows, left=(0,), rule=True)))


if __name__ == "__main__":
    main()
