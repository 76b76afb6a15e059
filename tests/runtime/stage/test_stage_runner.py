"""A stage says what it cannot do, and what to do instead."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import InputError, LocalGroup, PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from tests.distributed.bodies import blocks, mse, plain_gradients, rand, stages_of
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import assert_close


def compile_module(module: nn.Module) -> None:
    module.compile(backend="aot_eager")


def compile_forward(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward, backend="aot_eager")  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's
@pytest.mark.parametrize("compile_it", [compile_module, compile_forward])
def test_a_compiled_stage_says_once_that_its_backward_stays_whole(
    compile_it: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    # Of a compiled function in the place of forward nobody heard; its backward was whole, too.
    modules = blocks(4)
    x, y = rand(8, 8), rand(8, 8, seed=2)
    reference, _ = plain_gradients(modules, x, y)
    compile_it(modules[1])
    stages = [PipelineStage(m, i, 4, "cpu", group=LocalGroup(2)) for i, m in enumerate(modules)]
    made = ScheduleZBVZeroBubble(stages, 4, loss_fn=mse)

    with caplog.at_level(logging.WARNING, "fxpipe"):
        made.step(x, target=y)
        made.eval(x)
        made.step(rand(12, 8), target=rand(12, 8))  # another plan

    said = [r.getMessage() for r in caplog.records if r.name.startswith("fxpipe")]
    assert len(said) == 1
    assert said[0].startswith("stage 1 is compiled, so its backward cannot be split")
    for module in modules:
        module.zero_grad()
    made.step(x, target=y)
    for i, module in enumerate(modules):
        for p, q in zip(module.parameters(), reference[i].parameters(), strict=True):
            assert_close(p.grad, q.grad, f"stage {i}")


class ReturnsDTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate

        output = self.linear(x)
        if dist.get_rank() != 0 or output.is_meta or type(output) is not Tensor:
            return output
        mesh = DeviceMesh("cpu", [0], _init_backend=False)
        return DTensor.from_local(output, mesh, [Replicate()], run_check=False)


def dtensor_at_boundary(rank: int) -> None:
    modules = [ReturnsDTensor(), blocks(1)[0]]
    made = Schedule1F1B(stages_of(modules, [rank]), 2, loss_fn=mse, timeout=60.0)
    with pytest.raises(Exception, match=r"is laid out as DTensor .*, agreed was a plain") as caught:
        made.step(rand(4, 8), target=rand(4, 8))
    assert rank != 0 or isinstance(caught.value, InputError)


def test_a_dtensor_that_was_not_agreed_on_is_refused_on_all_ranks() -> None:
    run_on_ranks(2, dtensor_at_boundary)
