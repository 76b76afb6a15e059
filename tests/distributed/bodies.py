"""What the ranks of a distributed test run; each rank compares with its own plain model."""

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import models
from fxpipe import PipelineStage, collect_aux_losses, get_schedule_class, pipeline
from fxpipe.microbatch import split_batch
from fxpipe.program.generators import SCHEDULES
from tests.runtime.training import assert_close

__all__ = [
    "Block",
    "blocks",
    "by_group_alone",
    "layout",
    "mse",
    "plain_gradients",
    "rand",
    "stages_of",
    "train_blocks",
    "train_model",
]


class Block(nn.Module):
    def __init__(self, width: int = 8, out: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out or width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block().double() for _ in range(count)]


def rand(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def layout(schedule: str, rank: int, num_ranks: int) -> tuple[list[int], int]:
    """The stages of a rank and the number of stages, two per rank where allowed."""
    info = SCHEDULES[schedule]
    num_stages = num_ranks if info.stages_per_rank[1] == 1 else 2 * num_ranks
    return list(info.placement(num_ranks, num_stages).stages_of(rank)), num_stages


def stages_of(
    modules: list[nn.Module], indices: list[int], group: Any = None
) -> list[PipelineStage]:
    return [PipelineStage(modules[i], i, len(modules), "cpu", group=group) for i in indices]


def plain_gradients(
    modules: list[nn.Module], x: Tensor, y: Tensor
) -> tuple[list[nn.Module], Tensor]:
    """Copies of the modules with the gradients of one plain pass, and the output."""
    reference = [copy.deepcopy(module) for module in modules]
    for module in reference:
        module.zero_grad()
    h = x
    for module in reference:
        h = module(h)
    mse(h, y).backward()
    return reference, h.detach()


def train_model(rank: int, name: str, schedule: str, num_ranks: int, style: str) -> None:
    """Two optimizer steps of a model of `models/`, compared value by value.

    `style`: "same" makes the same call on every rank, "ranks" passes inputs on the rank
    of the first stage and the target on that of the last.
    """
    module = models.load(name)
    indices, num_stages = layout(schedule, rank, num_ranks)
    sizes = {} if module.SPLIT[num_stages] else {"stages": num_stages}
    model = module.build(seed=0, **sizes).double()
    plain = copy.deepcopy(model)
    args, kwargs = module.example_inputs(2, dtype=torch.float64)
    pipe = pipeline(model, args, kwargs, split_spec=models.split_spec(module, num_stages))
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in indices]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=module.loss_fn)
    mine = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(list({id(p): p for p in mine}.values()), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for seed, rows in ((1, 8), (2, 10)):
        args, kwargs = module.example_inputs(rows, seed=seed, dtype=torch.float64)
        target = module.example_target(rows, seed=seed, dtype=torch.float64)
        optimizer.zero_grad()
        reference.zero_grad()
        if style == "same":
            made.step(*args, target=target, **kwargs)
        else:
            given = kwargs if 0 in indices else {}
            made.step(
                *(args if 0 in indices else ()),
                target=target if num_stages - 1 in indices else None,
                **given,
            )
        loss = _plain_step(module, plain, args, kwargs, target, 4)
        if num_stages - 1 in indices:
            assert_close(made.loss, loss, "loss")
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        for stage in stages:
            for key, p in stage.submod.named_parameters(remove_duplicate=False):
                assert_close(p.grad, wanted[key].grad, f"{key}.grad on rank {rank}")
        optimizer.step()
        reference.step()
    wanted_state = plain.state_dict()
    for stage in stages:
        for key, value in stage.submod.state_dict().items():
            assert_close(value, wanted_state[key], f"{key} on rank {rank}")


def _plain_step(
    module: Any, plain: nn.Module, args: Any, kwargs: Any, target: Tensor, n: int
) -> Tensor:
    parts = split_batch(args, kwargs, n, target=target)
    total = torch.zeros((), dtype=torch.float64)
    for a, k, t in zip(parts.args, parts.kwargs, parts.target, strict=True):
        with collect_aux_losses() as aux:
            output = plain(*a, **k)
        share = len(t) / len(target)
        loss = module.loss_fn(output, t)
        ((loss + aux.total()) * share).backward()
        total = total + loss.detach() * share
    return total


def by_group_alone(rank: int, body: Callable[..., Any], *args: Any) -> Any:
    """Run another body with every message on the process group."""
    with mock.patch.dict(os.environ, FXPIPE_SOCKETS="0"):
        return body(rank, *args)


def train_blocks(rank: int, schedule: str, num_ranks: int, num_microbatches: int) -> None:
    """Hand-written stages: uneven batches, accumulation, evaluation, another length."""
    indices, num_stages = layout(schedule, rank, num_ranks)
    modules = blocks(num_stages)
    stages = stages_of(modules, indices)
    made = get_schedule_class(schedule)(stages, num_microbatches, loss_fn=mse)
    total: dict[int, list[Tensor]] = {}
    for seed, shape in ((1, (10, 3, 8)), (2, (8, 3, 8)), (3, (8, 5, 8))):
        x, y = rand(*shape, seed=seed), rand(*shape, seed=seed + 10)
        reference, output = plain_gradients(modules, x, y)
        found = made.step(x, target=y)
        for i in indices:
            grads = [p.grad for p in reference[i].parameters()]
            before = total.get(i, [torch.zeros_like(grad) for grad in grads])
            total[i] = [a + b for a, b in zip(before, grads, strict=True)]
            for p, grad in zip(modules[i].parameters(), total[i], strict=True):
                assert_close(p.grad, grad, f"stage {i} after step {seed}")
        if num_stages - 1 in indices:
            assert_close(found, output, f"output of step {seed}")
        evaluated = made.eval(x)
        if num_stages - 1 in indices:
            assert_close(evaluated, output, f"evaluation {seed}")
