"""A model that does random steps, each an idiom of code that people write in `forward`."""

import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.graph.random_models.parts import LEAVES, WIDTH, Collector, Helper
from tests.graph.random_models.state_steps import STEPS
from tests.graph.random_models.steps import Memory

__all__ = ["RandomNet"]


class Result(NamedTuple):
    hidden: Tensor
    extra: Any = None


class Output(dict[str, Any]):
    """A dict with attributes, as outputs of libraries are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


pytree.register_pytree_node(
    Output,
    lambda found: (list(found.values()), tuple(found)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    flatten_with_keys_fn=lambda found: (
        [(pytree.MappingKey(key), value) for key, value in found.items()],
        tuple(found),
    ),
)


class RandomNet(nn.Module):
    """Does its steps one after the other, in code that is split."""

    factor = 0.75

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(dice.choice(LEAVES)() for _ in range(dice.randint(2, 4)))
        if dice.random() < 0.2:
            self.parts[-1] = self.parts[0]
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if dice.random() < 0.3:
            self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("running", torch.ones(WIDTH), persistent=False)
        self.register_buffer("positions", torch.randn(12, WIDTH))
        self.helper, self.options = Helper(), {"factor": 0.5, "shifts": [1, 2]}
        self.flag, self.rate, self.limit = dice.random() < 0.5, 0.25, dice.randint(3, 6)
        self.state: Tensor | None = None
        self.activation = dice.choice((torch.tanh, F.silu, nn.GELU()))
        self.features = Collector()
        self.tables: dict[int, Tensor] = {}
        self.calls = 0
        self.output = dice.choice(("tensor", "tuple", "dict", "named", "nested", "own"))
        self.steps: list[tuple[str, int]] = []
        names = [*STEPS, "cut", "cut", "cut", "skip", "keep"]
        for index in range(len(self.parts)):
            self.steps.append(("leaf", index))
            for _ in range(dice.randint(0, 2)):
                self.steps.append((dice.choice(names), index))
        if any(name == "featured" for name, _ in self.steps):
            self.parts[0].register_forward_hook(self.features)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> Any:
        self.features.found.clear()
        x = self.first(x) * gain
        memory: Memory = {"kept": x, "mask": mask}
        for name, index in self.steps:
            x = STEPS[name](self, x, index, memory)
        x = self.last(x)
        kept = memory["kept"]
        return {
            "tensor": lambda: x,
            "tuple": lambda: (x, kept.mean()),
            "dict": lambda: {"x": x, "count": self.count.clone(), "none": None},
            "named": lambda: Result(x, x.argmax(-1)),
            "nested": lambda: [x, {"mean": (kept.mean(), 3, x > 0)}],
            "own": lambda: Output(hidden=x, other=(kept[:, -1],)),
        }[self.output]()
