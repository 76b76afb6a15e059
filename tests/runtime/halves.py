"""Run a module's backward both ways: plain, and as input half and weight half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.runtime.split.deferral import Deferral
from fxpipe.runtime.stage.received import receive

__all__ = ["Grads", "assert_same", "grads_of", "in_autocast", "plain", "seed", "split"]

Grads = dict[str, Tensor | None]


def plain(module: nn.Module, x: Tensor, *, wants_grad: bool) -> tuple[Tensor, Grads]:
    """Output and gradients of an ordinary backward; the input is no leaf, as in a model."""
    leaf = x.clone().requires_grad_(wants_grad)
    output = module(leaf * 1 if wants_grad else leaf)
    if output.requires_grad:
        output.backward(seed(output))
    return output.detach(), {"input": leaf.grad, **grads_of(module)}


def split(module: nn.Module, x: Tensor, *, wants_grad: bool) -> tuple[Tensor, Grads]:
    (value,), slots = receive([x.clone()], [wants_grad])
    deferral = Deferral()
    with deferral:
        output = module(value)
    if output.requires_grad:
        deferral.backward([output], [seed(output)])
    deferral.run()
    return output.detach(), {"input": slots.take(0), **grads_of(module)}


def seed(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel()).to(output.dtype).view(output.shape)


def grads_of(module: nn.Module) -> Grads:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(found: Grads, expected: Grads, tolerance: float = 1e-12) -> None:
    assert {k for k, v in found.items() if v is None} == {
        k for k, v in expected.items() if v is None
    }
    for name, grad in expected.items():
        if grad is not None:
            assert found[name].dtype is grad.dtype
            torch.testing.assert_close(
                found[name], grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def in_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.inner(x).float()
