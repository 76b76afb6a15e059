"""A ResNet with BatchNorm and in-place ReLU.

The difficulty: a forward changes state (running statistics, the batch counter), so
nothing may run a block one time too many, neither to trace it nor to find its
shapes; and the in-place ReLU overwrites values that may have to cross a boundary.

In training each microbatch is normalised by its own statistics, as in any other
pipeline: compare with the plain model microbatch by microbatch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SPLIT", "ResNet", "Sizes", "build", "example_inputs", "example_target", "loss_fn"]

SPLIT = {2: ("layers.2",), 4: ("layers.1", "layers.2", "layers.3")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger."""

    channels: int = 3
    width: int = 8
    layers: int = 4
    image: int = 16
    classes: int = 10


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.relu(self.norm1(self.conv1(image)))
        hidden = self.norm2(self.conv2(hidden))
        hidden += self.shortcut(image)
        return self.relu(hidden)


class ResNet(nn.Module):
    """Images in, class scores out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.stem = nn.Conv2d(sizes.channels, sizes.width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(sizes.width)
        self.relu = nn.ReLU(inplace=True)
        widths = [sizes.width * 2 ** (index // 2) for index in range(sizes.layers)]
        before = [sizes.width, *widths[:-1]]
        self.layers = nn.Sequential(
            *(Block(a, b, 1 if a == b else 2) for a, b in zip(before, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], sizes.classes)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.stem(image)))
        hidden = self.layers(hidden)
        return self.head(hidden.mean(dim=(2, 3)))


def build(*, seed: int = 0, **sizes: Any) -> ResNet:
    """A ResNet with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return ResNet(Sizes(**sizes))


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
    """Random classes."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(Sizes(**sizes).classes, (batch_size,), generator=generator)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, averaged over the images."""
    return F.cross_entropy(output, target)
