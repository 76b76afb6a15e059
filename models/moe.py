"""A mixture of experts: which rows an expert sees depends on the data.

The difficulty: inside a block the shapes depend on values (`nonzero`), so the
block cannot become a graph, only the code around it can. Each block also makes a
balance loss of its own, which is no part of the model's output: it is handed to
`report(value, weight=...)`.

`report` is `fxpipe.aux_loss` unless `build(report=...)` says otherwise; without
such a function it does nothing. `collect_balance` runs a model and returns what
was reported, for a plain reference:

    output, balance = collect_balance(model, *args)
    loss = loss_fn(output, target) + balance
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "SPLIT",
    "MixtureOfExperts",
    "Sizes",
    "build",
    "collect_balance",
    "example_inputs",
    "example_target",
    "loss_fn",
]

SPLIT = {2: ("blocks.2",), 4: ("blocks.1", "blocks.2", "blocks.3")}

Report = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be made bigger; `balance` is the weight of the balance loss."""

    vocab: int = 64
    width: int = 32
    feed: int = 32
    heads: int = 4
    experts: int = 4
    active: int = 2
    layers: int = 4
    length: int = 8
    balance: float = 0.01


class Experts(nn.Module):
    """Each token goes through its `active` best experts."""

    def __init__(self, sizes: Sizes, report: Report) -> None:
        super().__init__()
        self.active = sizes.active
        self.balance = sizes.balance
        self.report = report
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(sizes.width, sizes.feed), nn.SiLU(), nn.Linear(sizes.feed, sizes.width)
            )
            for _ in range(sizes.experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        probabilities = self.router(tokens).softmax(dim=-1)
        weights, chosen = probabilities.topk(self.active, dim=-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            if row.numel() == 0:
                continue
            result = result.index_add(0, row, expert(tokens[row]) * weights[row, slot, None])
        load = F.one_hot(chosen, len(self.experts)).sum(dim=1).to(tokens.dtype).mean(dim=0)
        value = len(self.experts) * (load * probabilities.mean(dim=0)).sum() / self.active
        self.report(value, weight=self.balance)
        return result.view_as(hidden)


class Block(nn.Module):
    """Attention, then the experts."""

    def __init__(self, sizes: Sizes, report: Report) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.experts = Experts(sizes, report)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(hidden)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.experts(self.norm2(hidden))


class MixtureOfExperts(nn.Module):
    """Token ids in, logits over the vocabulary out."""

    def __init__(self, sizes: Sizes, report: Report) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, report) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def build(*, seed: int = 0, report: Report | None = None, **sizes: Any) -> MixtureOfExperts:
    """A mixture of experts with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return MixtureOfExperts(Sizes(**sizes), report or _default_report())


def collect_balance(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    """Run the model; return its output and the weighted sum of its balance losses."""
    found: list[Tensor] = []

    def keep(value: Tensor, *, weight: float = 1.0) -> None:
        found.append(weight * value)

    layers = [module for module in model.modules() if isinstance(module, Experts)]
    before = [layer.report for layer in layers]
    try:
        for layer in layers:
            layer.report = keep
        output = model(*args, **kwargs)
    finally:
        for layer, report in zip(layers, before, strict=True):
            layer.report = report
    return output, torch.stack(found).sum()


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
    """Cross entropy, averaged over all tokens; the balance losses are not in it."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _default_report() -> Report:
    try:
        from fxpipe import aux_loss
    except ImportError:
        return _ignore
    return aux_loss


def _ignore(value: Tensor, *, weight: float = 1.0) -> None:
    """Stands in for `aux_loss` where fxpipe is not installed."""
