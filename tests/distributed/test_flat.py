"""Thousands of steps with changing shapes hold no more memory, descriptors or threads."""

import gc
import os

import pytest
import torch

from fxpipe import Schedule1F1B
from tests.distributed.bodies import blocks, mse, rand, stages_of
from tests.distributed.ranks import run_on_ranks

MEGABYTES = 40.0  # of growth after the warm-up; one step's tensors alone are more


def held() -> tuple[int, int, float]:
    """Open descriptors, threads, and resident megabytes of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * page


def many_steps(rank: int, steps: int, shapes: int) -> None:
    made = Schedule1F1B(stages_of(blocks(2), [rank]), 4, loss_fn=mse)

    def run(count: int) -> None:
        for step in range(count):
            x = rand(8 + step % 2, 1 + step % shapes, 8, seed=step)
            (made.eval if step % 7 == 0 else made.step)(x, target=torch.zeros_like(x))

    run(steps // 3)
    descriptors, threads, memory = held()
    run(steps)

    after = held()
    assert after[0] <= descriptors
    assert after[1] <= threads
    assert after[2] < memory + MEGABYTES


def test_steps_with_changing_shapes_hold_nothing() -> None:
    run_on_ranks(2, many_steps, 90, 4)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_three_thousand_steps_hold_nothing() -> None:
    run_on_ranks(2, many_steps, 3000, 97, limit=1400.0)
