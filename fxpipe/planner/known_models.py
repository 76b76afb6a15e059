"""Known models by name, as plain PyTorch decoders to plan with.

    model, ids = known_model("llama3-70b", sequence=8192)

They have the sizes of the published models and the operations that matter for time and memory
(attention, feed-forward parts, experts with balanced routing, low-rank attention), and are made
on the meta device: they cost nothing, and they are not for training.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

from fxpipe.errors import PlanError

__all__ = ["KNOWN", "Decoder", "Sizes", "known_model"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder; `feed` is the inner width of a dense layer.

    `gated` has SwiGLU and RMS norms, else GELU, layer norms and learned positions. With
    `experts`, layers from `dense` on have them, each of width `expert_feed`. `rank` is that
    of compressed keys and values (multi-head latent attention), `query_rank` of queries. A token
    goes to experts of at most `expert_groups[0]` of as many groups as `expert_groups[1]`.
    Without `fused` attention is made of products, a softmax and dropout, as before 2023; with
    `repeats_keys` keys and values are repeated for each query head, as before kernels could.
    """

    layers: int
    width: int
    heads: int
    feed: int
    vocabulary: int
    key_heads: int = 0
    head_width: int = 0
    gated: bool = True
    tied: bool = False
    length: int = 8192
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    expert_feed: int = 0
    dense: int = 0
    rank: int = 0
    query_rank: int = 0
    fused: bool = True
    repeats_keys: bool = False
    expert_groups: tuple[int, int] | None = None


def gpt(layers: int, width: int, heads: int, *, length: int = 2048, fused: bool = True) -> Sizes:
    """A GPT of the classic shape; without `fused` attention its matrix of weights is kept."""
    return Sizes(
        layers, width, heads, 4 * width, 51200, gated=False, tied=True, length=length, fused=fused
    )


KNOWN: Mapping[str, Sizes] = MappingProxyType(
    {
        # The Llama 3 Herd of Models, table 3
        "llama3-8b": Sizes(32, 4096, 32, 14336, 128256, key_heads=8),
        "llama3-70b": Sizes(80, 8192, 64, 28672, 128256, key_heads=8),
        "llama3-405b": Sizes(126, 16384, 128, 53248, 128256, key_heads=8),
        # Llama 2, model cards
        "llama2-7b": Sizes(32, 4096, 32, 11008, 32000, length=4096),
        "llama2-13b": Sizes(40, 5120, 40, 13824, 32000, length=4096),
        "llama2-70b": Sizes(80, 8192, 64, 28672, 32000, key_heads=8, length=4096),
        # Language Models are Few-Shot Learners, table 2.1
        "gpt3-175b": gpt(96, 12288, 96),
        # Qwen3 model cards
        "qwen3-8b": Sizes(36, 4096, 32, 12288, 151936, key_heads=8, length=4096),
        "qwen3-32b": Sizes(64, 5120, 64, 25600, 151936, key_heads=8, head_width=128, length=4096),
        "qwen3-30b-a3b": Sizes(48, 2048, 32, 6144, 151936, key_heads=4, head_width=128,
                               length=4096, experts=128, chosen=8, expert_feed=768),
        "qwen3-235b-a22b": Sizes(94, 4096, 64, 12288, 151936, key_heads=4, head_width=128,
                                 length=4096, experts=128, chosen=8, expert_feed=1536),
        "mixtral-8x7b": Sizes(32, 4096, 32, 14336, 32000, key_heads=8, length=4096, experts=8,
                              chosen=2, expert_feed=14336),
        # DeepSeek-V3 technical report, section 4.2
        "deepseek-v3": Sizes(61, 7168, 128, 18432, 129280, head_width=128, length=4096,
                             experts=256, chosen=8, shared=1, expert_feed=2048, dense=3,
                             rank=512, query_rank=1536, expert_groups=(4, 8)),
    }
)  # fmt: skip


def known_model(
    name: str | Sizes, *, sequence: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Decoder, torch.Tensor]:
    """A model on the meta device, and token ids for a call of it.

    Raises:
        PlanError: no model has that name; the closest ones are listed.
    """
    if isinstance(name, str):
        sizes = KNOWN.get(name.lower())
        if sizes is None:
            close = difflib.get_close_matches(name.lower(), KNOWN, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise PlanError(f"there is no known model {name!r}; {hint}known: {', '.join(KNOWN)}")
    else:
        sizes = name
    length = sequence or sizes.length
    with torch.device("meta"):
        model = Decoder(sizes, length).to(dtype)
    return model, torch.zeros(2, length, dtype=torch.long, device="meta")


class Decoder(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = None if sizes.gated else nn.Embedding(length, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, index) for index in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            hidden = layer(hidden)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


class Layer(nn.Module):
    """Attention and a feed-forward part, each with a norm before and a residual around."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed = _norm(sizes), _norm(sizes)
        self.attention: nn.Module = LatentAttention(sizes) if sizes.rank else Attention(sizes)
        has_experts = sizes.experts and index >= sizes.dense
        self.feed: nn.Module = (
            Experts(sizes) if has_experts else Feed(sizes.width, sizes.feed, sizes.gated)
        )

        self.drops = not sizes.fused

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for norm, part in (
            (self.before_attention, self.attention),
            (self.before_feed, self.feed),
        ):
            made = part(norm(hidden))
            hidden = hidden + (_dropped(made) if self.drops else made)
        return hidden


class Attention(nn.Module):
    """Causal attention; several query heads may share keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.each = sizes.head_width or sizes.width // sizes.heads
        self.heads, self.key_heads = sizes.heads, sizes.key_heads or sizes.heads
        self.rotates, self.fused = sizes.gated, sizes.fused
        self.repeats = self.heads // self.key_heads if sizes.repeats_keys else 1
        counts = [self.heads * self.each, *[self.key_heads * self.each] * 2]
        # Three products as in Llama, or one as in GPT.
        self.inside = nn.ModuleList(
            nn.Linear(sizes.width, count, bias=not sizes.gated)
            for count in (counts if sizes.gated else [sum(counts)])
        )
        self.outside = nn.Linear(self.heads * self.each, sizes.width, bias=not sizes.gated)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        made = [product(hidden) for product in self.inside]
        parts = made if len(made) == 3 else made[0].chunk(3, -1)
        query, key, value = (
            part.view(batch, length, -1, self.each).transpose(1, 2) for part in parts
        )
        if self.rotates:
            query, key = _rotated(query), _rotated(key)
        if self.repeats > 1:
            key, value = (t.repeat_interleave(self.repeats, 1) for t in (key, value))
        if self.fused:
            mixed = _attention(query, key, value)
        else:
            seen = (query @ key.transpose(2, 3)).softmax(-1)
            mixed = (_dropped(seen) @ value).transpose(1, 2).flatten(2)
        found: torch.Tensor = self.outside(mixed)
        return found


class LatentAttention(nn.Module):
    """Attention whose keys and values are expanded from a few numbers per token."""

    rotated = 64

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.each, self.rank = sizes.heads, sizes.head_width, sizes.rank
        whole = self.each + self.rotated
        self.query_down = nn.Linear(sizes.width, sizes.query_rank, bias=False)
        self.query_up = nn.Linear(sizes.query_rank, sizes.heads * whole, bias=False)
        self.down = nn.Linear(sizes.width, sizes.rank + self.rotated, bias=False)
        self.up = nn.Linear(sizes.rank, sizes.heads * 2 * self.each, bias=False)
        self.outside = nn.Linear(sizes.heads * self.each, sizes.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query = self.query_up(self.query_down(hidden))
        query = query.view(batch, length, self.heads, -1).transpose(1, 2)
        small, turned = self.down(hidden).split([self.rank, self.rotated], -1)
        both = self.up(small).view(batch, length, self.heads, 2 * self.each).transpose(1, 2)
        key, value = both.split(self.each, -1)
        turned = _rotated(turned.view(batch, 1, length, self.rotated))
        key = torch.cat([key, turned.expand(-1, self.heads, -1, -1)], -1)
        # The kernel wants one width; what is added to the values is cut off again.
        value = functional.pad(value, (0, self.rotated))
        mixed = _attention(query, key, value)
        mixed = mixed.view(batch, length, self.heads, -1)[..., : self.each].flatten(2)
        found: torch.Tensor = self.outside(mixed)
        return found


class Feed(nn.Module):
    """A feed-forward part, gated or not."""

    def __init__(self, width: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.up = nn.Linear(width, inner, bias=not gated)
        self.down = nn.Linear(inner, width, bias=not gated)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.up(hidden)
        if self.gate is not None:
            made = functional.silu(self.gate(hidden)) * made
        else:
            made = functional.gelu(made)
        found: torch.Tensor = self.down(made)
        return found


class Experts(nn.Module):
    """Experts that each get the same number of tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.count, self.chosen = sizes.experts, sizes.chosen
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = nn.ParameterDict(
            {
                "up": nn.Parameter(torch.empty(sizes.experts, sizes.width, 2 * sizes.expert_feed)),
                "down": nn.Parameter(torch.empty(sizes.experts, sizes.expert_feed, sizes.width)),
            }
        )
        inner = sizes.shared * sizes.expert_feed
        self.shared = Feed(sizes.width, inner, gated=True) if inner else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        weights, which = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        order = which.flatten().argsort()
        each = -(-order.shape[0] // self.count)
        order = functional.pad(order, (0, each * self.count - order.shape[0]))
        rows = order // self.chosen
        taken = tokens[rows].view(self.count, each, -1)
        gate, made = torch.bmm(taken, self.experts["up"]).chunk(2, -1)
        # Weighted before the second product: what that makes need not be kept.
        made = functional.silu(gate) * made * weights.flatten()[order].view(self.count, each, 1)
        made = torch.bmm(made, self.experts["down"]).flatten(0, 1)
        mixed = torch.zeros_like(tokens).index_add(0, rows, made).view_as(hidden)
        return mixed if self.shared is None else mixed + self.shared(hidden)


def _norm(sizes: Sizes) -> nn.Module:
    return nn.RMSNorm(sizes.width) if sizes.gated else nn.LayerNorm(sizes.width)


def _dropped(x: torch.Tensor) -> torch.Tensor:
    """Dropout that keeps a mask of bytes, as a GPU's kernel does."""
    found: torch.Tensor = torch.native_dropout(x, 0.1, True)[0]
    return found


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """As many operations as rotary positions take."""
    left, right = x.chunk(2, -1)
    return x * 0.5 + torch.cat([-right, left], -1) * 0.5


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mixed = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed.transpose(1, 2).flatten(2)
