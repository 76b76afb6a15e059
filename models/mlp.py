"""A perceptron that says itself where to cut, and takes keyword inputs.

The difficulty: the cuts are `pipe_split()` markers in `forward`, inside a loop, and
each part reads the keyword inputs `scale` and `shift`, so they are wanted in every
stage. Outside of a trace a marker does nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe import pipe_split

__all__ = ["MLP", "SPLIT", "Sizes", "build", "example_inputs", "example_target", "loss_fn"]

SPLIT: dict[int, tuple[str, ...]] = {2: (), 4: ()}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger; there are `stages - 1` markers."""

    width: int = 16
    layers: int = 4
    stages: int = 4


class MLP(nn.Module):
    """Rows in, rows out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        if not 1 <= sizes.stages <= sizes.layers:
            raise ValueError(f"{sizes.layers} layers cannot be cut into {sizes.stages} stages")
        self.layers = nn.ModuleList(
            nn.Linear(sizes.width, sizes.width) for _ in range(sizes.layers)
        )
        bounds = (stage * sizes.layers // sizes.stages for stage in range(1, sizes.stages))
        self.marked = frozenset(bounds)

    def forward(
        self, rows: Tensor, *, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in self.marked:
                pipe_split()
            rows = torch.tanh(layer(rows))
            if scale is not None:
                rows = rows * scale
            if shift is not None:
                rows = rows + shift
        return rows


def build(*, seed: int = 0, **sizes: Any) -> MLP:
    """A perceptron with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return MLP(Sizes(**sizes))


def example_inputs(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random rows, with a scale per row and a shift per element."""
    width = Sizes(**sizes).width
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((batch_size, width), generator=generator, dtype=dtype)
    scale = torch.rand((batch_size, 1), generator=generator, dtype=dtype) + 0.5
    shift = torch.randn((batch_size, width), generator=generator, dtype=dtype)
    return (rows,), {"scale": scale, "shift": shift}


def example_target(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Tensor:
    """Random rows."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn((batch_size, Sizes(**sizes).width), generator=generator, dtype=dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all elements."""
    return F.mse_loss(output, target)
