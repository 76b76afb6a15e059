"""A Llama whose rotary tables are made once and read by every layer.

The difficulty: `cos` and `sin` come out of one module near the input and go into
all blocks, so each later stage needs a value that is not the output of the stage
before it. They need no gradient and depend on the length alone, so making them
again is cheaper than sending them. Keys and values have fewer heads than queries.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SPLIT", "Llama", "Sizes", "build", "example_inputs", "example_target", "loss_fn"]

SPLIT = {2: ("layers.2",), 4: ("layers.1", "layers.2", "layers.3")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger; `heads` is a multiple of `kv_heads`."""

    vocab: int = 64
    width: int = 32
    feed: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 4
    length: int = 8
    theta: float = 10000.0


class Rotary(nn.Module):
    """Positions in, cosine and sine tables out."""

    frequencies: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        size = sizes.width // sizes.heads
        powers = torch.arange(0, size, 2, dtype=torch.float32) / size
        self.register_buffer("frequencies", sizes.theta**-powers, persistent=False)

    def forward(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].to(self.frequencies.dtype) * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(value: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels by the angle of its position."""
    cos, sin = tables
    left, right = value.chunk(2, dim=-1)
    return value * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention; several query heads share one key and value head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.heads * self.size, bias=False)
        self.key = nn.Linear(sizes.width, sizes.kv_heads * self.size, bias=False)
        self.value = nn.Linear(sizes.width, sizes.kv_heads * self.size, bias=False)
        self.out = nn.Linear(sizes.heads * self.size, sizes.width, bias=False)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(query, tables), rotate(key, tables), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """RMS-normed attention and gated feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.width, eps=1e-6)
        self.attention = Attention(sizes)
        self.norm2 = nn.RMSNorm(sizes.width, eps=1e-6)
        self.gate = nn.Linear(sizes.width, sizes.feed, bias=False)
        self.up = nn.Linear(sizes.width, sizes.feed, bias=False)
        self.down = nn.Linear(sizes.feed, sizes.width, bias=False)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), tables)
        normed = self.norm2(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Token ids in, logits over the vocabulary out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.rotary = Rotary(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        tables = self.rotary(torch.arange(ids.shape[1], device=ids.device), hidden)
        for layer in self.layers:
            hidden = layer(hidden, tables)
        return self.head(self.norm(hidden))


def build(*, seed: int = 0, **sizes: Any) -> Llama:
    """A Llama with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return Llama(Sizes(**sizes))


def example_inputs(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random token ids."""
    known = Sizes(**sizes)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(known.vocab, (batch_size, known.length), generator=generator),), {}


def example_target(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Tensor:
    """The ids moved left by one: each position predicts the next token."""
    (ids,), _ = example_inputs(batch_size, seed=seed, dtype=dtype, **sizes)
    return ids.roll(-1, dims=1)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, averaged over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
