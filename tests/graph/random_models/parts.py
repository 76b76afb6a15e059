"""Leaves of random models: small modules, each with one habit of real ones."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = ["LEAVES", "WIDTH", "Collector", "Helper", "main_output"]

WIDTH = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Block(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Statistics(nn.Module):
    """A batch norm, which changes its buffers while training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class FrozenStatistics(Statistics):
    """Stays in evaluation, as in detection models."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self


class Average(Plain):
    """Keeps a running mean of what it sees while training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.linear(x - self.mean)


class Cached(Plain):
    """Keeps a table by length, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1]).cos()
        return self.linear(x) * self.table[: x.shape[1], None]


class Counts(Plain):
    """Counts its calls, and uses the count."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class Pair(Plain):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.linear(x), "more": (x.mean(1), None)}


@dataclasses.dataclass
class Found:
    hidden: Tensor
    length: int
    extra: Tensor | None = None


class Describes(Plain):
    """Returns an object, with a number that follows from a size."""

    def forward(self, x: Tensor) -> Found:
        return Found(self.linear(x), x.shape[1])


class Auxiliary(Plain):
    """Leaves a loss on itself, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = y.square().mean()
        return y


class InPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).add_(1).relu_()


class ChangesInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


class Attention(nn.Module):
    """The kernel call of the stages must be that of the plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Chooses(Plain):
    """Decides by values, which a leaf may do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class Experts(nn.Module):
    """Sends each token to one of two linear layers, and counts who got how many."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("load", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        weight, chosen = scores.max(-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where = chosen == index
            self.load[index] += where.sum()
            output[where] = expert(x[where]) * weight[where, None]
        self.aux = scores.mean((0, 1)).square().sum()
        return output


class Crops(Plain):
    def forward(self, x: Tensor) -> Tensor:
        head = self.linear(x[:, :3])
        return torch.cat((head, x[:, 3:]), 1)


class Spectrum(nn.Module):
    """Goes through complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x, dim=1) * self.filter
        return torch.fft.irfft(found, n=x.shape[1], dim=1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Maybe(Plain):
    """Stochastic depth: skips itself at times while training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return self.linear(x)


class Called(Plain):
    """Has a `__call__` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Spectral(nn.Module):
    """Changes buffers of a parametrization while training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Tree(nn.Module):
    """A module with modules inside, in which cuts may fall."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Plain(), Block())
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x) * self.gate


class DeepTree(nn.Module):
    """A tree of trees, with a loop, a skip, a mode and a buffer at each level."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Tree(), Block()))
        self.names = nn.ModuleDict({"graph": Plain(), "class": nn.Tanh()})
        self.register_buffer("seen", torch.zeros(()))
        self.rate = 0.2

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        start = x
        for layer in self.layers:
            x = layer(x) * scale
        if self.training:
            self.seen += 1
        x = F.dropout(x, self.rate, self.training)
        return self.names["class"](self.names["graph"](x)) + start


class Helper:
    """No module: keeps a table between calls."""

    table: Tensor | None = None

    def get(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.arange(length).sin()[:, None]
        return self.table[:length]


class Collector:
    """A forward hook that keeps what a module returned."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.found.append(main_output(output))


LEAVES: tuple[type[nn.Module], ...] = (
    Plain, Block, Statistics, FrozenStatistics, Average, Cached, Counts, Pair, Describes,
    Auxiliary, InPlace, ChangesInput, nn.Identity, nn.Tanh, Attention, Recurrent, Chooses,
    Experts, Crops, Spectrum, Convolution, Maybe, Called, Weighted, Spectral, Tree, Tree,
    DeepTree, DeepTree,
)  # fmt: skip


def main_output(output: Any) -> Tensor:
    """The tensor that the model goes on with, of what a leaf returned."""
    if isinstance(output, Found):
        return output.hidden / output.length
    if isinstance(output, dict):
        return output["hidden"] + output["more"][0][:, None]
    return output
