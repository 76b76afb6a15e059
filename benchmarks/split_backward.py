"""Time input half + weight half against one whole backward, beside torch's own split.

Each line is one stage module. "whole" is a plain forward and `torch.autograd.backward`;
the ratios divide a split by it. "backward" compares the backwards alone, "step" forward
and backward together, because what a split prepares in the forward is part of its price.
CPU time on one thread, the variants in turns, the median of many rounds: what else the
machine does changes the ratios little.

    python -m benchmarks.split_backward [--rounds 30] [--only mlp]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fxpipe.runtime.split.deferral import Deferral
from fxpipe.runtime.split.engine import run_backward
from fxpipe.runtime.stage.received import receive

__all__ = ["main"]


class Block(nn.Module):
    """A transformer block in plain modules."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


def mlp(dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(dim, 4 * dim),
        nn.ReLU(),
        nn.Linear(4 * dim, 4 * dim),
        nn.ReLU(),
        nn.Linear(4 * dim, dim),
    )


def blocks(dim: int, count: int) -> nn.Module:
    return nn.Sequential(*(Block(dim, 4) for _ in range(count)))


def convolutions(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp, tiny (8 x 16)": (lambda: mlp(16), (8, 16)),
    "mlp, small (64 x 64)": (lambda: mlp(64), (64, 64)),
    "mlp, large (256 x 256)": (lambda: mlp(256), (256, 256)),
    "blocks, tiny (2 x 2 x 8 x 32)": (lambda: blocks(32, 2), (2, 8, 32)),
    "blocks, small (2 x 4 x 32 x 64)": (lambda: blocks(64, 2), (4, 32, 64)),
    "blocks, large (2 x 4 x 128 x 256)": (lambda: blocks(256, 2), (4, 128, 256)),
    "conv, small (4 x 4 x 8 x 8 x 8)": (lambda: convolutions(8), (4, 8, 8, 8)),
    "conv, large (4 x 8 x 32 x 32 x 32)": (lambda: convolutions(32), (8, 32, 32, 32)),
}

Times = tuple[float, float]  # backward, forward and backward


def whole(module: nn.Module, x: Tensor, grad: Tensor) -> Times:
    start = time.process_time()
    (value,), slots = receive([x], [True])
    output = module(value)
    middle = time.process_time()
    run_backward([output], [grad])
    end = time.process_time()
    assert slots.take(0) is not None
    return end - middle, end - start


def ours(module: nn.Module, x: Tensor, grad: Tensor) -> Times:
    start = time.process_time()
    (value,), slots = receive([x], [True])
    deferral = Deferral()
    with deferral:
        output = module(value)
    middle = time.process_time()
    deferral.backward([output], [grad])
    deferral.run()
    end = time.process_time()
    assert slots.take(0) is not None
    return end - middle, end - start


def theirs(module: nn.Module, x: Tensor, grad: Tensor) -> Times:
    start = time.process_time()
    value = x.detach().requires_grad_()
    output = module(value)
    middle = time.process_time()
    _, groups = stage_backward_input([output], [grad], [value], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    end = time.process_time()
    return end - middle, end - start


VARIANTS = (whole, ours, theirs)


def measure(module: nn.Module, x: Tensor, *, rounds: int) -> list[Times]:
    """The median backward and step time of each variant, gradients accumulating."""
    grad = torch.randn_like(module(x))
    once = max(whole(module, x, grad)[1] for _ in range(3))
    rounds = max(rounds, min(1000, int(rounds * 0.02 / once)))
    times: list[list[Times]] = [[] for _ in VARIANTS]
    for _ in range(rounds):
        for variant, found in zip(VARIANTS, times, strict=True):
            found.append(variant(module, x, grad))
    return [
        (statistics.median(b for b, _ in found), statistics.median(s for _, s in found))
        for found in times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{'':36}{'whole, ms':>18}{'fxpipe / whole':>20}{'torch / whole':>20}")
    print(f"{'':36}{'backward   step':>18}{'backward   step':>20}{'backward   step':>20}")
    for name, (build, shape) in CASES.items():
        if options.only in name:
            base, mine, other = measure(build(), torch.randn(shape), rounds=options.rounds)
            cells = f"{base[0] * 1e3:10.3f}{base[1] * 1e3:8.3f}"
            for found in (mine, other):
                cells += f"{found[0] / base[0]:12.2f}{found[1] / base[1]:8.2f}"
            print(f"{name:36}{cells}", flush=True)


if __name__ == "__main__":
    main()
