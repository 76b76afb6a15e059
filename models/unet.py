"""A U-Net: what goes down on the left comes back on the right, stages later.

The difficulty: each skip connection is made in an early stage and read in a late
one, so values pass over the stages between, and their gradients come back the
same way.

    stem ─ down.0 ─ down.1 ─ down.2 ─ middle ─ up.0 ─ up.1 ─ up.2 ─ head
             │        │        └────────────────┘      │      │
             │        └────────────────────────────────┘      │
             └────────────────────────────────────────────────┘
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SPLIT", "Sizes", "UNet", "build", "example_inputs", "example_target", "loss_fn"]

SPLIT = {2: ("middle",), 4: ("down.1", "middle", "up.1")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger; `image` is a multiple of 8."""

    channels: int = 3
    width: int = 8
    image: int = 16


class Block(nn.Module):
    """Two convolutions with group norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class Down(nn.Module):
    """Returns the image at half the size, and the full-size skip."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = Block(inputs, outputs)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.block(image)
        return F.avg_pool2d(skip, 2), skip


class Up(nn.Module):
    """Doubles the size and joins the skip."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = Block(inputs, outputs)

    def forward(self, image: Tensor, skip: Tensor) -> Tensor:
        image = F.interpolate(image, size=skip.shape[-2:], mode="nearest")
        return self.block(torch.cat((image, skip), dim=1))


class UNet(nn.Module):
    """Image in, image of the same size out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.stem = nn.Conv2d(sizes.channels, width, 3, padding=1)
        self.down = nn.ModuleList(
            [Down(width, width), Down(width, 2 * width), Down(2 * width, 4 * width)]
        )
        self.middle = Block(4 * width, 4 * width)
        self.up = nn.ModuleList(
            [Up(8 * width, 2 * width), Up(4 * width, width), Up(2 * width, width)]
        )
        self.head = nn.Conv2d(width, sizes.channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.stem(image)
        skips = []
        for down in self.down:
            hidden, skip = down(hidden)
            skips.append(skip)
        hidden = self.middle(hidden)
        for up in self.up:
            hidden = up(hidden, skips.pop())
        return self.head(hidden)


def build(*, seed: int = 0, **sizes: Any) -> UNet:
    """A U-Net with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return UNet(Sizes(**sizes))


def example_inputs(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random images."""
    known = Sizes(**sizes)
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, known.channels, known.image, known.image)
    return (torch.randn(shape, generator=generator, dtype=dtype),), {}


def example_target(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Tensor:
    """The images turned upside down."""
    (image,), _ = example_inputs(batch_size, seed=seed, dtype=dtype, **sizes)
    return image.flip(-1)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all pixels."""
    return F.mse_loss(output, target)
