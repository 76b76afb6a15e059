"""Hand-written stages for tests, all ranks in this process."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import LocalGroup, PipelineStage, get_schedule_class
from tests.runtime.training import assert_close, ranks_for

__all__ = ["Block", "check_step", "mse", "rand", "run_plain", "schedule_for"]


class Block(nn.Module):
    def __init__(self, width: int = 8, out: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out or width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def rand(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def schedule_for(
    modules: Sequence[nn.Module],
    name: str = "1F1B",
    num_microbatches: int = 4,
    *,
    loss_fn: Any = mse,
    stage_options: Callable[[int], dict[str, Any]] = lambda _: {},
    **options: Any,
) -> Any:
    """A schedule over the modules as stages of one local pipeline."""
    group = LocalGroup(ranks_for(name, len(modules)))
    stages = [
        PipelineStage(module.double(), i, len(modules), "cpu", group=group, **stage_options(i))
        for i, module in enumerate(modules)
    ]
    return get_schedule_class(name)(stages, num_microbatches, loss_fn=loss_fn, **options)


def run_plain(modules: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """The modules one after the other; a tuple is the next one's arguments."""
    value: Any = args
    for module in modules:
        value = module(*(value if type(value) is tuple else (value,)), **kwargs)
    return value


def check_step(
    modules: Sequence[nn.Module],
    name: str,
    x: Tensor,
    y: Tensor,
    *,
    num_microbatches: int = 4,
    **options: Any,
) -> Any:
    """Train one step and compare outputs and every gradient with one plain pass."""
    modules = [module.double() for module in modules]
    reference = copy.deepcopy(nn.ModuleList(modules))
    reference.zero_grad()
    made = schedule_for(modules, name, num_microbatches, **options)

    output = made.step(x, target=y)

    expected = run_plain(reference, x)
    mse(expected, y).backward()
    assert_close(output, expected, "output")
    for i, (module, plain) in enumerate(zip(modules, reference, strict=True)):
        for (key, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert_close(p.grad, q.grad, f"stage {i} {key}.grad")
    return made
