"""A vision transformer whose container owns parameters and uses them itself.

The difficulty: the class token and the position table belong to no submodule that
could be moved as a whole; the container's own code reads them, between calls of
submodules that end up in different stages. The position table is read twice, at
the input and before the head, so two stages share a parameter under one name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "SPLIT",
    "Sizes",
    "VisionTransformer",
    "build",
    "example_inputs",
    "example_target",
    "loss_fn",
]

SPLIT = {2: ("blocks.2",), 4: ("blocks.1", "blocks.2", "blocks.3")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger; `image` is a multiple of `patch`."""

    channels: int = 3
    image: int = 16
    patch: int = 4
    width: int = 32
    heads: int = 4
    layers: int = 4
    classes: int = 10


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.feed = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(),
            nn.Linear(4 * sizes.width, sizes.width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm1(hidden)
        mixed, _ = self.attention(normed, normed, normed, need_weights=False)
        hidden = hidden + mixed
        return hidden + self.feed(self.norm2(hidden))


class VisionTransformer(nn.Module):
    """Images in, class scores out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        patches = (sizes.image // sizes.patch) ** 2
        self.patches = nn.Conv2d(sizes.channels, sizes.width, sizes.patch, sizes.patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, patches + 1, sizes.width) * 0.02)
        self.scale = nn.Parameter(torch.ones(sizes.width))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.classes)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.patches(image).flatten(2).transpose(1, 2)
        token = self.class_token.expand(hidden.shape[0], -1, -1)
        hidden = torch.cat((token, hidden), dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden) * self.scale
        return self.head(self.norm(hidden[:, 0] + self.positions[:, 0]))


def build(*, seed: int = 0, **sizes: Any) -> VisionTransformer:
    """A vision transformer with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return VisionTransformer(Sizes(**sizes))


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
