"""Steps of random models: calls of parts, values kept on the way, sizes, flags and the world.

A step gets the model, the tensor that goes through it, the place of the part before it, and a
dict that lives for one call. `state_steps.py` has those that draw, change or keep something.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpipe import pipe_split
from tests.graph.random_models.parts import WIDTH, main_output

__all__ = ["CONTEXT", "STEPS", "WORLD", "Memory", "step"]

Memory = dict[str, Any]
STEPS: dict[str, Callable[[Any, Tensor, int, Memory], Tensor]] = {}
WORLD = {"gain": 1.5}  # a global that code reads
CONTEXT = contextvars.ContextVar("bias", default=0.25)


def step(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    STEPS[function.__name__] = function
    return function


# -- modules


@step
def leaf(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return main_output(net.parts[index](x))


@step
def again(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return leaf(net, x, index // 2, memory)


@step
def looped(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    for part in net.parts[:2]:
        x = x + main_output(part(x))
    return x


@step
def by_keyword(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return net.last(input=x)


@step
def cut(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    pipe_split()
    return x


@step
def frozen(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    with torch.no_grad():
        target = leaf(net, x, index, memory)
    return x + target


@step
def saved(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return checkpoint(leaf, net, x, index, memory, use_reentrant=False)


@step
def auxiliary(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    aux = getattr(net.parts[index], "aux", None)
    return x if aux is None else x + aux


@step
def all_auxiliaries(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + sum(part.aux for part in net.parts if hasattr(part, "aux"))


@step
def swapped(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    part = net.first
    return torch.func.functional_call(part, {"weight": part.weight * 2}, (x,))


@step
def featured(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + sum(found.mean() for found in net.features.found)


@step
def activated(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return net.activation(x)


# -- values kept on the way


@step
def keep(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["kept"] = x
    return x


@step
def skip(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + memory["kept"]


@step
def counted_here(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["steps"] = memory.get("steps", 0) + 1
    return x * memory["steps"]


@step
def gathered(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory.setdefault("all", []).append(x)
    return x + sum(part.mean() for part in memory["all"])


@step
def masked(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    mask = memory["mask"]
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


@step
def stopped(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + memory["kept"].detach()


@step
def watched(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


# -- sizes


@step
def size(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 2 if x.shape[1] > net.limit else x + 1


@step
def even(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x - 1 if x.shape[1] % 2 else x


@step
def rows(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] > 1 else x


@step
def head(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    first = x[:, : net.limit]
    return x + first.mean(1, keepdim=True) * first.shape[1]


@step
def short(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    length = min(net.limit, x.shape[1])
    return x + x[:, :length].sum(1, keepdim=True) / length


@step
def padded(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    more = -x.shape[1] % 4
    return F.pad(x, (0, 0, 0, more)).cumsum(1)[:, : x.shape[1]]


@step
def placed(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + net.positions[: x.shape[1]]


@step
def each_token(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    for row in range(x.shape[1]):
        x = x + row
    return x


@step
def recurrent(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    state = x.new_zeros(x.shape[0], WIDTH)
    states = []
    for token in x.unbind(1):
        state = torch.tanh(net.last(token) + state)
        states.append(state)
    return torch.stack(states, 1)


@step
def distances(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    length = x.size(1)
    where = torch.arange(length, device=x.device)
    mask = where[None] <= where[:, None]
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x / length**0.5


@step
def numbered(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * float(x.shape[1]) / x.numel()


# -- flags, modes, the world


@step
def flagged(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return torch.tanh(x) if net.flag else x * net.scale


@step
def mode(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 1.5 if net.training else torch.sin(x)


@step
def part_mode(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 0.5 if net.parts[index].training else x


@step
def optioned(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * net.options["factor"] + len(net.options["shifts"])


@step
def of_class(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * net.factor


@step
def of_world(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * WORLD["gain"]


@step
def of_context(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + CONTEXT.get()


@step
def graded(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 0.5


@step
def partly_graded(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    with torch.set_grad_enabled(net.flag):
        return x + x.detach() * net.scale


@step
def trained(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 2 if net.scale.requires_grad else x


@step
def typed(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * 0.5 if x.dtype == torch.float32 else x
