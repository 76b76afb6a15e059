"""Custom autograd functions in code that is opened keep their own backward."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpipe import pipe_split, pipeline


class Doubled(torch.autograd.Function):
    """Identity whose gradient is twice the right one, so a lost backward shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Modern(torch.autograd.Function):
    """The form with setup_context, two outputs and a parameter as input."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        return x * weight, weight**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return first * weight * 3, (first * x).sum(0) + second, None


class Numpy(torch.autograd.Function):
    """Runs outside of torch: cannot run on tensors without data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh() ** 2) * 5


class Written(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 7


held = Doubled.apply


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.randn(8))

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.a(x))
        pipe_split()
        return self.middle(self.b(x))


class WithDoubled(Net):
    def middle(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, 2.0)


class WithHeld(Net):
    def middle(self, x: Tensor) -> Tensor:
        return held(x, 3.0)


class WithModern(Net):
    def middle(self, x: Tensor) -> Tensor:
        y, z = Modern.apply(x, self.gain)
        return y + z


class WithNumpy(Net):
    def middle(self, x: Tensor) -> Tensor:
        return Numpy.apply(x)


class WithWritten(Net):
    def middle(self, x: Tensor) -> Tensor:
        x = x + 1
        Written.apply(x)
        return x * 3


@pytest.mark.parametrize("kind", [WithDoubled, WithHeld, WithModern, WithNumpy, WithWritten])
def test_values_and_gradients_are_the_models(kind: type[Net]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (torch.randn(4, 8),))
    x = torch.randn(5, 8)

    found, wanted = pipe(x), plain(x)
    found.square().sum().backward()
    wanted.square().sum().backward()

    assert pipe.num_stages == 2
    torch.testing.assert_close(found, wanted)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, msg=name)


def test_apply_is_as_before_after_a_trace() -> None:
    before = dict(torch.autograd.Function.__mro__[1].__dict__)

    pipeline(WithDoubled(), (torch.randn(4, 8),))

    assert dict(torch.autograd.Function.__mro__[1].__dict__) == before
