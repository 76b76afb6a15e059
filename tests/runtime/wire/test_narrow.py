"""A boundary dtype changes what travels, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe import InputError, LocalGroup, PipelineStage, ScheduleError, get_schedule_class
from tests.distributed.bodies import blocks, mse, plain_gradients, rand, stages_of
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import assert_close, ranks_for


class Rounded(torch.autograd.Function):
    """What crossing a boundary in float32 does to a value, and to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float().double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.float().double()


class RoundedFirst(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(Rounded.apply(x))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_values_that_change_rank_are_rounded_and_no_others(schedule: str) -> None:
    modules = blocks(4)
    num_ranks = ranks_for(schedule, 4)
    stages = [
        PipelineStage(m, i, 4, "cpu", group=LocalGroup(num_ranks)) for i, m in enumerate(modules)
    ]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=mse, boundary_dtype=torch.float32)
    rank_of = made.program.placement.stage_to_rank
    changed = [i > 0 and rank_of[i] != rank_of[i - 1] for i in range(4)]
    pairs = zip(modules, changed, strict=True)
    rounded = [RoundedFirst(m) if is_changed else m for m, is_changed in pairs]
    x, y = rand(8, 8), rand(8, 8, seed=2)
    reference, output = plain_gradients(rounded, x, y)
    exact, _ = plain_gradients(modules, x, y)

    found = made.step(x, target=y)

    assert_close(found, output, "output", 1e-14)
    differs = False
    for i, module in enumerate(modules):
        grads = zip(module.parameters(), reference[i].parameters(), strict=True)
        for p, q in grads:
            assert_close(p.grad, q.grad, f"stage {i}", 1e-7)
        others = zip(module.parameters(), exact[i].parameters(), strict=True)
        differs |= any(not torch.equal(p.grad, q.grad) for p, q in others)
    assert differs


def narrow_on_ranks(rank: int) -> None:
    modules = blocks(2)
    x, y = rand(8, 8), rand(8, 8, seed=2)
    reference, _ = plain_gradients(modules, x, y)
    made = get_schedule_class("1F1B")(
        stages_of(modules, [rank]), 4, loss_fn=mse, boundary_dtype=torch.float32
    )
    made.step(x, target=y)
    for p, q in zip(modules[rank].parameters(), reference[rank].parameters(), strict=True):
        assert_close(p.grad, q.grad, f"stage {rank}", 1e-5)
        assert rank == 1 or not torch.equal(p.grad, q.grad)
    other = get_schedule_class("1F1B")(
        stages_of(modules, [rank]),
        4,
        loss_fn=mse,
        boundary_dtype=torch.float32 if rank else torch.bfloat16,
    )
    with pytest.raises(ScheduleError, match=r"boundary_dtype: torch.bfloat16 on rank 0, torch"):
        other.step(x, target=y)


@pytest.mark.parametrize("backend", ["gloo", "nccl_rank"])
def test_ranks_agree_on_what_travels(backend: str) -> None:
    run_on_ranks(2, narrow_on_ranks, backend=backend)


def test_a_dtype_without_fractions_is_refused() -> None:
    stage = PipelineStage(blocks(1)[0], 0, 1, "cpu", group=LocalGroup(1))

    with pytest.raises(InputError, match="boundary_dtype must be a floating-point dtype"):
        get_schedule_class("GPipe")([stage], 4, loss_fn=mse, boundary_dtype=torch.int8)
