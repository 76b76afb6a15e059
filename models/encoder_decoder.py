"""An encoder and a decoder, whose own input arrives late and by keyword.

The difficulty: `decoder_ids` is first read in a middle stage, `source_mask` is
read by both halves, and the encoder's result goes into the cross-attention of
every decoder layer, so several late stages need the same early value.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "SPLIT",
    "EncoderDecoder",
    "Sizes",
    "build",
    "example_inputs",
    "example_target",
    "loss_fn",
]

SPLIT = {2: ("decoder",), 4: ("encoder.layers.1", "decoder", "decoder.layers.1")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger; `layers` counts each side."""

    vocab: int = 64
    width: int = 32
    heads: int = 4
    layers: int = 2
    length: int = 8
    decoder_length: int = 6


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width)
        self.memory = nn.Linear(sizes.width, 2 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(hidden), *self.memory(memory).chunk(2, dim=-1))
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def feed_forward(width: int) -> nn.Sequential:
    """The part that looks at one position at a time."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class EncoderLayer(nn.Module):
    """Self-attention under the source mask."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.feed = feed_forward(sizes.width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(hidden)
        hidden = hidden + self.attention(normed, normed, mask)
        return hidden + self.feed(self.norm2(hidden))


class DecoderLayer(nn.Module):
    """Causal self-attention, then attention to the encoder's result."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.cross = Attention(sizes)
        self.norm3 = nn.LayerNorm(sizes.width)
        self.feed = feed_forward(sizes.width)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(hidden)
        hidden = hidden + self.attention(normed, normed)
        hidden = hidden + self.cross(self.norm2(hidden), memory, mask)
        return hidden + self.feed(self.norm3(hidden))


class Encoder(nn.Module):
    """Source ids in, memory out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.norm(hidden)


class Decoder(nn.Module):
    """Decoder ids and the encoder's memory in, hidden states out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, ids: Tensor, *, memory: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, memory, mask)
        return self.norm(hidden)


class EncoderDecoder(nn.Module):
    """Source ids in; logits for the decoder's positions and the memory out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.encoder = Encoder(sizes)
        self.decoder = Decoder(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(
        self, source_ids: Tensor, *, decoder_ids: Tensor, source_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        if source_mask is None:
            source_mask = torch.ones_like(source_ids, dtype=torch.bool)
        mask = source_mask[:, None, None, :]
        memory = self.encoder(source_ids, mask)
        hidden = self.decoder(decoder_ids, memory=memory, mask=mask)
        return {"logits": self.head(hidden), "memory": memory}


def build(*, seed: int = 0, **sizes: Any) -> EncoderDecoder:
    """An encoder-decoder with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return EncoderDecoder(Sizes(**sizes))


def example_inputs(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Source ids by position; decoder ids and a ragged source mask by keyword."""
    known = Sizes(**sizes)
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(known.vocab, (batch_size, known.length), generator=generator)
    decoder = torch.randint(known.vocab, (batch_size, known.decoder_length), generator=generator)
    lengths = torch.randint(1, known.length + 1, (batch_size, 1), generator=generator)
    mask = torch.arange(known.length)[None, :] < lengths
    return (source,), {"decoder_ids": decoder, "source_mask": mask}


def example_target(
    batch_size: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Tensor:
    """The decoder ids moved left by one."""
    _, kwargs = example_inputs(batch_size, seed=seed, dtype=dtype, **sizes)
    target: Tensor = kwargs["decoder_ids"]
    return target.roll(-1, dims=1)


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy over the decoder's tokens, with a small pull on the memory."""
    entropy = F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
    return entropy + 1e-3 * output["memory"].square().mean()
