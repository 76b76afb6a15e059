"""`torch.utils.checkpoint` in opened code still saves memory, and changes no values."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from fxpipe import pipe_split, pipeline


class Counted(nn.Module):
    """A linear layer that counts how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counted() for _ in range(4))
        self.gain = nn.Parameter(torch.randn(8))

    def half(self, first: int, x: Tensor) -> Tensor:
        x = self.layers[first](x) * self.gain
        x = functional.dropout(x, 0.5, self.training)
        return self.layers[first + 1](x.view(x.shape[0], 8))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(functools.partial(self.half, 0), x, use_reentrant=False)
        pipe_split()
        return checkpoint(functools.partial(self.half, 2), x, use_reentrant=False)


class Reentrant(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        x = checkpoint(functools.partial(self.half, 0), x, use_reentrant=True)
        pipe_split()
        return checkpoint(functools.partial(self.half, 2), x, use_reentrant=True)


class CutInside(Net):
    def half(self, first: int, x: Tensor) -> Tensor:
        x = self.layers[first](x) * self.gain
        pipe_split()
        return self.layers[first + 1](x)


class SeveralValues(Net):
    def pair(self, x: Tensor, scale: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.layers[0](x) * scale["by"]
        return self.layers[1](y), {"kept": y, "shape": x.sum(0)}

    def forward(self, x: Tensor) -> Tensor:
        y, others = checkpoint(self.pair, x, {"by": self.gain}, use_reentrant=False)
        pipe_split()
        return self.layers[2](y) + self.layers[3](others["kept"]) + others["shape"]


class Sequential(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False)
        pipe_split()
        return x * self.gain


def assert_same_gradients(model: Net, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (torch.randn(4, 8),))

    torch.manual_seed(1)
    wanted = plain(x)
    wanted.square().sum().backward()
    torch.manual_seed(1)
    found = pipe(x)
    found.square().sum().backward()

    assert pipe.num_stages > 1
    torch.testing.assert_close(found, wanted)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert [layer.runs for layer in model.layers] == [layer.runs for layer in plain.layers]


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        (Net, [2, 2, 2, 2]),
        (Reentrant, [2, 2, 2, 2]),
        (CutInside, [2, 2, 2, 2]),
        (SeveralValues, [2, 2, 1, 1]),
        (Sequential, [2, 2, 1, 1]),
    ],
)
def test_each_layer_is_recomputed_once(kind: type[Net], runs: list[int]) -> None:
    model = kind()

    assert_same_gradients(model, torch.randn(3, 8))

    assert [layer.runs for layer in model.layers] == runs


def test_only_the_inputs_of_a_checkpoint_are_kept() -> None:
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    pipe = pipeline(Net(), (torch.randn(4, 8),))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pipe(torch.randn(4, 8))

    assert kept == [torch.Size([4, 8]), torch.Size([8])] * 2


def test_evaluation_and_no_grad_recompute_nothing() -> None:
    model = Net().eval()
    pipe = pipeline(model, (torch.randn(4, 8),))
    x = torch.randn(3, 8)

    with torch.no_grad():
        found = pipe(x)

    assert [layer.runs for layer in model.layers] == [1, 1, 1, 1]
    torch.testing.assert_close(found, model(x))


def test_a_checkpoint_inside_another() -> None:
    class Inner(Net):
        def half(self, first: int, x: Tensor) -> Tensor:
            x = self.layers[first](x)
            return checkpoint(self.layers[first + 1], x, use_reentrant=False) * self.gain

    assert_same_gradients(Inner(), torch.randn(3, 8))


def test_options_reach_the_checkpoint() -> None:
    asked: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(op)
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Net):
        def forward(self, x: Tensor) -> Tensor:
            context = functools.partial(create_selective_checkpoint_contexts, policy)
            half = functools.partial(self.half, 0)
            x = checkpoint(half, x, use_reentrant=False, context_fn=context)
            pipe_split()
            return self.layers[2](x)

    # The check would run the model, and ask the policy that must not be asked by a trace.
    pipe = pipeline(Selective(), (torch.randn(4, 8),), check=False)
    assert asked == []

    pipe(torch.randn(4, 8)).sum().backward()

    assert torch.ops.aten.tanh.default in asked


def test_without_inputs_that_need_gradients_the_old_variant_gives_none() -> None:
    # The plain model warns that its gradients will be None; the stages must not invent some.
    class Ids(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(functools.partial(self.half, 0), x, use_reentrant=True)
            pipe_split()
            return self.layers[2](x)

    model = Ids()
    pipe = pipeline(model, (torch.randn(4, 8),))

    pipe(torch.randn(4, 8)).sum().backward()

    assert model.layers[0].linear.weight.grad is None
    assert model.layers[2].linear.weight.grad is not None


def test_a_copy_of_a_stage_uses_its_own_parameters() -> None:
    model = Net().eval()
    pipe = pipeline(model, (torch.randn(4, 8),))
    stage = copy.deepcopy(pipe.get_stage_module(1))
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()

    assert torch.equal(stage(torch.randn(4, 8)), torch.zeros(4, 8))
