"""One rank of many without the others: the "fake" process group, as dry runs use it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpipe import (
    PipelineStage,
    PipeliningShapeError,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    pipeline,
)
from fxpipe.program import simulate
from tests.runtime.stages import Block, mse, rand


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    rank, size = request.param
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield rank, size
    dist.destroy_process_group()


def everyone(size: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "world", [(rank, size) for rank in range(size)], indirect=True, ids="rank{0[0]}".format
    )


@pytest.mark.parametrize("world", [(0, 1)], indirect=True)
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_a_world_of_one_rank_computes_what_the_model_computes(world, kind):
    module = Block()
    x, y = rand(4, 8), rand(4, 8, seed=2)
    module.double()
    mse(module(x), y).backward()
    wanted = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    schedule = kind(PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=mse)

    output = schedule.step(x, target=y)

    torch.testing.assert_close(output, module(x))
    for found, plain in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.grad, plain)


def step(schedule, rank, size, x):
    given = (x,) if rank == 0 else ()
    last = size - 1 if not isinstance(schedule, ScheduleZBVZeroBubble) else 0
    return schedule.step(*given, target=x if rank == last else None)


@everyone(4)
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_one_rank_of_many_steps_without_its_peers(world, kind):
    rank, size = world
    num_stages = size if kind is Schedule1F1B else 2 * size
    mine = {
        Schedule1F1B: [rank],
        ScheduleInterleaved1F1B: [rank, rank + size],
        ScheduleZBVZeroBubble: [rank, 2 * size - 1 - rank],
    }[kind]
    stages = [
        PipelineStage(Block(), index, num_stages, "cpu", input_args=torch.zeros(1, 8))
        for index in mine
    ]
    schedule = kind(stages, 8, loss_fn=mse)

    step(schedule, rank, size, torch.randn(8, 8))

    assert f"{size} ranks" in repr(schedule)
    assert simulate(schedule.program).makespan > 0
    for stage in stages:
        assert all(p.grad is not None for p in stage.submod.parameters())


@everyone(2)
def test_fake_tensors_go_through_a_step(world):
    rank, size = world
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU())  # 17 GB, were it real
        examples = torch.zeros(1, 1 << 16)
        stage = PipelineStage(module, rank, size, "cpu", input_args=examples)
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)

        step(schedule, rank, size, torch.zeros(4, 1 << 16))

        assert module[0].weight.grad.shape == (1 << 16, 1 << 16)


@everyone(3)
def test_traced_stages_step_alone_if_each_call_has_the_inputs(world):
    rank, _ = world
    model = nn.Sequential(*[Block() for _ in range(3)])
    x = torch.randn(6, 8)
    pipe = pipeline(model, (x[:2],), num_stages=3)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 3, loss_fn=mse)

    schedule.step(x, target=x)

    assert all(p.grad is not None for p in stage.submod.parameters())


@pytest.mark.parametrize("world", [(1, 2)], indirect=True)
def test_what_no_rank_can_say_must_be_declared(world):
    schedule = Schedule1F1B(PipelineStage(Block(), 1, 2, "cpu"), 2, loss_fn=mse)

    with pytest.raises(PipeliningShapeError, match=r"fake process group.*input_args="):
        schedule.step(target=torch.zeros(2, 8))
