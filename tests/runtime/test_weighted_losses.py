"""Losses that are a sum with a weight go together with auxiliary losses, exactly."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe import (
    InputError,
    LocalGroup,
    PipelineStage,
    Schedule1F1B,
    aux_loss,
    collect_aux_losses,
    get_schedule_class,
    pipe_split,
    pipeline,
)

NAMES = ("GPipe", "1F1B", "ZBH1")
X = torch.randn(8, 4, dtype=torch.float64)


class Part(nn.Module):
    """Adds the size of its output to the loss; draws, so that a second run must draw alike."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.dropout = nn.Dropout(p)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.linear(self.dropout(x)))
        aux_loss(h.pow(2).mean(), 0.3)
        return h


def masked_sum(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    mask = target > 0
    return ((output - target).pow(2) * mask).sum(), mask.sum()


def plain_step(modules: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    with collect_aux_losses() as aux:
        output = x
        for module in modules:
            output = module(output)
    total, weight = masked_sum(output, y)
    loss = total / weight if weight else total * 0
    (loss + aux.total()).backward()
    return loss.detach()


def schedule_of(modules: list[nn.Module], name: str = "1F1B", loss_fn: Any = masked_sum) -> Any:
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    return get_schedule_class(name)(stages, 4, loss_fn=loss_fn)


def same_gradients(one: list[nn.Module], two: list[nn.Module]) -> None:
    for a, b in zip(one, two, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("name", NAMES)
def test_weighted_and_auxiliary_losses_give_the_plain_gradients(name: str) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Part(), Part()]
    plain = copy.deepcopy(modules)
    made = schedule_of(modules, name)

    # Another weight each time, the same twice, and none at all; gradients accumulate.
    for shift in (0.0, 1.0, 1.0, -1.0, -99.0):
        y = torch.randn(8, 4, dtype=torch.float64) + shift
        if shift == 1.0:
            y = X + 2.0
        made.step(X, target=y)
        loss = plain_step(plain, X, y)
        if shift > -99.0:
            torch.testing.assert_close(made.loss, loss)
        same_gradients(modules, plain)


def test_a_step_that_is_made_again_draws_and_counts_once() -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Part(0.5), Part(0.5)]
    other = copy.deepcopy(modules)
    y = torch.randn(8, 4, dtype=torch.float64)

    made = schedule_of(modules)
    torch.manual_seed(3)
    made.step(X, target=y)
    draw = torch.rand(())

    # The same with the weight of the batch known before, as a mean: nothing is made again.
    weight = float((y > 0).sum())
    again = schedule_of(other, loss_fn=lambda o, t: masked_sum(o, t)[0] * 4 / weight)
    torch.manual_seed(3)
    again.step(X, target=y)
    assert torch.equal(draw, torch.rand(()))
    same_gradients(modules, other)
    assert [float(module.calls) for module in modules] == [4.0, 4.0]


def test_weights_that_change_from_run_to_run_are_refused() -> None:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return (output - target).sum(), torch.tensor(float(len(calls)))

    made = schedule_of([Part(), Part()], loss_fn=loss)

    with pytest.raises(InputError, match="other weights each time"):
        made.step(X, target=X)


def test_a_loss_may_become_weighted_later() -> None:
    # The gradients of the first weighted step were not divided: nothing was put aside for it.
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    plain = copy.deepcopy(modules)
    weighted: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Any:
        return masked_sum(output, target) if weighted else (output - target).pow(2).mean()

    made = schedule_of(modules, loss_fn=loss)
    y = torch.randn(8, 4, dtype=torch.float64)
    made.step(X, target=y)
    weighted.append(True)
    made.step(X, target=y)

    (plain[1](plain[0](X)) - y).pow(2).mean().backward()
    plain_step(plain, X, y)
    same_gradients(modules, plain)


def test_an_auxiliary_loss_in_split_code_is_recorded() -> None:
    # It was dropped without a word: only leaves called it when the stages ran.
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            aux_loss(h.pow(2).mean(), 0.3)
            pipe_split()
            y: Tensor = self.b(h)
            aux_loss(y.abs().mean())
            return y

    torch.manual_seed(0)
    model = Whole()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (X[:2],))
    stages = [pipe.build_stage(i, "cpu", LocalGroup(2)) for i in range(2)]
    made = Schedule1F1B(stages, 4, loss_fn=masked_sum)
    y = torch.randn(8, 4, dtype=torch.float64)

    made.step(X, target=y)

    with collect_aux_losses() as aux:
        output = plain(X)
    total, weight = masked_sum(output, y)
    (total / weight + aux.total()).backward()
    torch.testing.assert_close(made.aux_loss, aux.total().detach())
    same_gradients([model], [plain])


def _clamp(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("kind", ["hook", "post", "module"])
def test_hooks_see_gradients_that_are_divided(kind: str) -> None:
    """A hook that is not linear, such as clamping, needs the gradient of the mean."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4).double() for _ in range(2)]
    plain = copy.deepcopy(nn.Sequential(*modules))
    for part in (modules[1], plain[1]):
        if kind == "hook":
            part.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        elif kind == "post":
            part.weight.register_post_accumulate_grad_hook(_clamp)
        else:
            part.register_full_backward_hook(lambda _, grads, __: (grads[0].clamp(-0.01, 0.01),))
    x, y = torch.randn(4, 4).double(), torch.randn(4, 4).double()

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).pow(2).sum(), torch.tensor(16.0)

    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    made = Schedule1F1B(stages, 1, loss_fn=loss)
    for _ in range(2):
        for p in (*plain.parameters(), *(p for m in modules for p in m.parameters())):
            p.grad = None
        made.step(x, target=y)
        (loss(plain(x), y)[0] / 16.0).backward()
        for p, q in zip(
            [p for m in modules for p in m.parameters()], plain.parameters(), strict=True
        ):
            torch.testing.assert_close(p.grad, q.grad)
