"""A GPT whose embedding and output head are one parameter.

The difficulty: the first stage embeds with the weight that the last stage
projects with. Both stages must hold it, its gradient is the sum of both uses, and
the copies must stay equal through the optimizer. Dropout is off by default
(`dropout=0.1` switches it on, so that `train()` and `eval()` differ).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "SPLIT", "Sizes", "build", "example_inputs", "example_target", "loss_fn"]

SPLIT = {2: ("blocks.2",), 4: ("blocks.1", "blocks.2", "blocks.3")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger."""

    vocab: int = 64
    width: int = 32
    heads: int = 4
    layers: int = 4
    length: int = 8
    max_length: int = 128
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.dropout = sizes.dropout
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.feed = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(),
            nn.Linear(4 * sizes.width, sizes.width),
            nn.Dropout(sizes.dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.feed(self.norm2(hidden))


class GPT(nn.Module):
    """Token ids in, logits over the vocabulary out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.positions = nn.Embedding(sizes.max_length, sizes.width)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.drop(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def build(*, seed: int = 0, **sizes: Any) -> GPT:
    """A GPT with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return GPT(Sizes(**sizes))


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
