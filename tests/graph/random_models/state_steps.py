"""Steps of random models that draw, change in place, keep something, or look at values."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.random_models.parts import WIDTH
from tests.graph.random_models.steps import STEPS, Memory, step

__all__ = ["STEPS"]


# -- random numbers


@step
def dropout(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return F.dropout(x, net.rate, net.training)


@step
def noise(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + torch.rand(x.shape[-1]) + torch.randn_like(x) * 0.1


@step
def shuffled(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x[:, torch.randperm(x.shape[1])] * torch.bernoulli(torch.full((WIDTH,), 0.8))


# -- changes in place, views


@step
def change(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    x = x.clone()
    x[:, 0] += 1
    return x.mul_(0.5)


@step
def change_kept(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["kept"] = memory["kept"].clone()
    part = memory["kept"][:, :1]
    part.add_(1)
    return x + memory["kept"]


@step
def change_behind(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    memory["kept"] = x = x * 1
    x += 1
    return x


@step
def view(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    b, s, w = x.shape
    return x.view(b, s, 2, w // 2).transpose(1, 2).reshape(b, -1, w // 2).reshape(b, s, w)


@step
def flat(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return net.last(x.flatten(0, 1)).view_as(x)


@step
def halves(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((right, left), -1)


@step
def filled(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    found = torch.empty_like(x)
    found[..., :2] = x[..., 2:]
    found[..., 2:].copy_(x[..., :2])
    return found


@step
def of_weights(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * net.first.weight[0] + net.scale.view(2, 2).t().flatten()


@step
def tied(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return F.linear(x, net.first.weight.t())


@step
def attended(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


# -- buffers, caches, state


@step
def counted(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.count += 1
    return x / net.count


@step
def replaced(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.count = net.count * 0.9 + 1
    return x * net.count


@step
def averaged(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    if net.training:
        with torch.no_grad():
            net.running.lerp_(x.mean((0, 1)), 0.1)
    return x - net.running


@step
def copied(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.running.copy_(x.detach().mean((0, 1)))
    return x * net.running


@step
def helped(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + net.helper.get(x.shape[1])


@step
def tabled(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    if x.shape[1] not in net.tables:
        net.tables[x.shape[1]] = torch.linspace(0, 1, x.shape[1])[:, None]
    return x + net.tables[x.shape[1]]


@step
def stored(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.latest = x.mean()
    return x + net.latest


@step
def stateful(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    if net.state is None:
        net.state = torch.zeros(WIDTH)
    net.state = 0.5 * net.state + x.detach().mean((0, 1))
    return x + net.state


@step
def called(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    net.calls += 1
    return x + net.calls


# -- dtypes and values


@step
def precise(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return (x.double() @ torch.eye(WIDTH, dtype=torch.float64)).to(x.dtype)


@step
def half(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + net.first(x).to(x.dtype)


@step
def ranked(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    values, where = x.topk(2, -1)
    return x.scatter_add(-1, where, values) + F.one_hot(where[..., 0], WIDTH)


@step
def chosen(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return torch.where(x > 0, x, -0.1 * x)


@step
def decided(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x + 1 if x.mean() > 0 else x - 1


@step
def itemized(net: Any, x: Tensor, index: int, memory: Memory) -> Tensor:
    return x * x.abs().max().item()
