"""A model that does random steps, each an idiom of code that people write in `forward`."""

import contextvars
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxpipe import pipe_split
from tests.graph.random_models.parts import LEAVES, WIDTH, Collector, Helper, main_output

__all__ = ["CONTEXT", "STEPS", "WORLD", "RandomNet"]

Memory = dict[str, Any]
STEPS: dict[str, Callable[["RandomNet", Tensor, int, Memory], Tensor]] = {}
WORLD = {"gain": 1.5}  # a global that code reads
CONTEXT = contextvars.ContextVar("bias", default=0.25)


def step(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    STEPS[function.__name__] = function
    return function


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


# -- modules


@step
def leaf(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return main_output(net.parts[index](x))


@step
def again(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return leaf(net, x, index // 2, memory)


@step
def looped(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    for part in net.parts[:2]:
        x = x + main_output(part(x))
    return x


@step
def by_keyword(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return net.last(input=x)


@step
def cut(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    pipe_split()
    return x


@step
def frozen(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    with torch.no_grad():
        target = leaf(net, x, index, memory)
    return x + target


@step
def saved(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return checkpoint(leaf, net, x, index, memory, use_reentrant=False)


@step
def auxiliary(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    aux = getattr(net.parts[index], "aux", None)
    return x if aux is None else x + aux


@step
def all_auxiliaries(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + sum(part.aux for part in net.parts if hasattr(part, "aux"))


@step
def swapped(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    part = net.first
    return torch.func.functional_call(part, {"weight": part.weight * 2}, (x,))


@step
def featured(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + sum(found.mean() for found in net.features.found)


@step
def activated(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return net.activation(x)


# -- values kept on the way


@step
def keep(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["kept"] = x
    return x


@step
def skip(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + memory["kept"]


@step
def counted_here(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["steps"] = memory.get("steps", 0) + 1
    return x * memory["steps"]


@step
def gathered(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory.setdefault("all", []).append(x)
    return x + sum(part.mean() for part in memory["all"])


@step
def masked(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    mask = memory["mask"]
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


@step
def stopped(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + memory["kept"].detach()


@step
def watched(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


# -- sizes


@step
def size(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 2 if x.shape[1] > net.limit else x + 1


@step
def even(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x - 1 if x.shape[1] % 2 else x


@step
def rows(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] > 1 else x


@step
def head(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    first = x[:, : net.limit]
    return x + first.mean(1, keepdim=True) * first.shape[1]


@step
def short(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    length = min(net.limit, x.shape[1])
    return x + x[:, :length].sum(1, keepdim=True) / length


@step
def padded(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    more = -x.shape[1] % 4
    return F.pad(x, (0, 0, 0, more)).cumsum(1)[:, : x.shape[1]]


@step
def placed(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + net.positions[: x.shape[1]]


@step
def each_token(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    for row in range(x.shape[1]):
        x = x + row
    return x


@step
def recurrent(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    state = x.new_zeros(x.shape[0], WIDTH)
    states = []
    for token in x.unbind(1):
        state = torch.tanh(net.last(token) + state)
        states.append(state)
    return torch.stack(states, 1)


@step
def distances(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    length = x.size(1)
    where = torch.arange(length, device=x.device)
    mask = where[None] <= where[:, None]
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x / length**0.5


@step
def numbered(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * float(x.shape[1]) / x.numel()


# -- flags, modes, the world


@step
def flagged(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return torch.tanh(x) if net.flag else x * net.scale


@step
def mode(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 1.5 if net.training else torch.sin(x)


@step
def part_mode(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 0.5 if net.parts[index].training else x


@step
def optioned(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * net.options["factor"] + len(net.options["shifts"])


@step
def of_class(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * net.factor


@step
def of_world(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * WORLD["gain"]


@step
def of_context(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + CONTEXT.get()


@step
def graded(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 0.5


@step
def partly_graded(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    with torch.set_grad_enabled(net.flag):
        return x + x.detach() * net.scale


@step
def trained(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 2 if net.scale.requires_grad else x


@step
def typed(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 0.5 if x.dtype == torch.float32 else x


# -- random numbers


@step
def dropout(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return F.dropout(x, net.rate, net.training)


@step
def noise(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + torch.rand(x.shape[-1]) + torch.randn_like(x) * 0.1


@step
def shuffled(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x[:, torch.randperm(x.shape[1])] * torch.bernoulli(torch.full((WIDTH,), 0.8))


# -- changes in place, views


@step
def change(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    x = x.clone()
    x[:, 0] += 1
    return x.mul_(0.5)


@step
def change_kept(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["kept"] = memory["kept"].clone()
    part = memory["kept"][:, :1]
    part.add_(1)
    return x + memory["kept"]


@step
def change_behind(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["kept"] = x = x * 1
    x += 1
    return x


@step
def view(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    b, s, w = x.shape
    return x.view(b, s, 2, w // 2).transpose(1, 2).reshape(b, -1, w // 2).reshape(b, s, w)


@step
def flat(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return net.last(x.flatten(0, 1)).view_as(x)


@step
def halves(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((right, left), -1)


@step
def filled(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    found = torch.empty_like(x)
    found[..., :2] = x[..., 2:]
    found[..., 2:].copy_(x[..., :2])
    return found


@step
def of_weights(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * net.first.weight[0] + net.scale.view(2, 2).t().flatten()


@step
def tied(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return F.linear(x, net.first.weight.t())


@step
def attended(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


# -- buffers, caches, state


@step
def counted(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.count += 1
    return x / net.count


@step
def replaced(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.count = net.count * 0.9 + 1
    return x * net.count


@step
def averaged(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    if net.training:
        with torch.no_grad():
            net.running.lerp_(x.mean((0, 1)), 0.1)
    return x - net.running


@step
def copied(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.running.copy_(x.detach().mean((0, 1)))
    return x * net.running


@step
def helped(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + net.helper.get(x.shape[1])


@step
def tabled(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    if x.shape[1] not in net.tables:
        net.tables[x.shape[1]] = torch.linspace(0, 1, x.shape[1])[:, None]
    return x + net.tables[x.shape[1]]


@step
def stored(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.latest = x.mean()
    return x + net.latest


@step
def stateful(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    if net.state is None:
        net.state = torch.zeros(WIDTH)
    net.state = 0.5 * net.state + x.detach().mean((0, 1))
    return x + net.state


@step
def called(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.calls += 1
    return x + net.calls


# -- dtypes and values


@step
def precise(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return (x.double() @ torch.eye(WIDTH, dtype=torch.float64)).to(x.dtype)


@step
def half(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + net.first(x).to(x.dtype)


@step
def ranked(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    values, where = x.topk(2, -1)
    return x.scatter_add(-1, where, values) + F.one_hot(where[..., 0], WIDTH)


@step
def chosen(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return torch.where(x > 0, x, -0.1 * x)


@step
def decided(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + 1 if x.mean() > 0 else x - 1


@step
def itemized(net: RandomNet, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * x.abs().max().item()
