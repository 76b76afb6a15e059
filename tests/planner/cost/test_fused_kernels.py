"""What kernels keep that fuse everything around products."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxpipe.planner.cost.training import Training, as_run
from fxpipe.planner.cost.watch import entry, observe

ROWS, WIDTH, INNER = 64, 16, 48
NUMBER = 4  # bytes


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        made: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + made


@pytest.fixture(scope="module")
def seen():
    module, stash = _Gated(), []

    def build():
        return (entry(torch.zeros(ROWS, WIDTH), stash),), {}

    return observe(module, build, partial(list, module.parameters()))


@pytest.mark.parametrize(("float8", "operands"), [(False, 1.0), (True, 0.5)])
def test_operands_and_results_of_products_are_kept_and_nothing_else(seen, float8, operands):
    training = Training(kernels="overlapped", float8=float8)

    kept = as_run(seen, training, is_block=True).kept_inside

    # The norm's result and the activation, both read by products; gate and up, made by them.
    read, made = ROWS * (WIDTH + INNER) * NUMBER, 2 * ROWS * INNER * NUMBER
    assert kept == operands * read + made
    # A plain model keeps silu(gate) as well, and what the norm has computed.
    assert seen.kept_inside >= read + made + ROWS * INNER * NUMBER


@pytest.mark.parametrize("kernels", ["eager", "compiled", "fused"])
def test_other_kernels_keep_what_autograd_keeps(seen, kernels):
    assert as_run(seen, Training(kernels=kernels), is_block=True).kept_inside == seen.kept_inside
