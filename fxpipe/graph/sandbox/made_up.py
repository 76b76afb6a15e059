"""Make tensors up: without data, of any size; or real ones, with values that mean nothing.

One that requires a gradient has a history, as if computed, so that code may change it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpipe.graph.interface import TensorSpec

__all__ = ["another", "empty", "filled", "grown"]


def empty(
    shape: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    """Return a new tensor, a fake one inside a fake mode."""
    if not requires_grad:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    with torch.enable_grad():
        anchor = torch.empty((), device=device, requires_grad=True)
        computed: Any = _Computed.apply
        made: torch.Tensor = computed(anchor, shape, stride, dtype)
        return made


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, shape: Any, stride: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, None


def another(leaf: Any, shape: Sequence[Any] | None = None) -> Any:
    """Return an empty tensor like this one, or of another size; anything else as it is.

    Of another size it is dense, in the order of the given one; what was expanded stays so.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    stride = leaf.stride() if shape is None else _strides(leaf, shape)
    device = torch.device("cpu") if leaf.is_meta else leaf.device
    return empty(shape or leaf.shape, stride, leaf.dtype, device, leaf.requires_grad)


def _strides(leaf: torch.Tensor, shape: Sequence[Any]) -> list[Any]:
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    order = sorted(range(len(shape)), key=lambda dim: (leaf.stride(dim), -dim))
    for dim in order:
        if leaf.stride(dim) != 0 or leaf.shape[dim] == 1:
            strides[dim] = step
            step = step * shape[dim]
    return strides


def filled(
    spec: torch.Tensor | TensorSpec,
    shape: Sequence[int],
    device: torch.device,
    *,
    with_ones: bool = False,
) -> torch.Tensor:
    """Return a real tensor: random numbers, zeros for integers, True; or other values: ones, False.

    Integers and flags may be indices and masks. Those of the two kinds differ everywhere.
    """
    dtype = spec.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full(shape, with_ones is not (dtype == torch.bool), dtype=dtype, device=device)
    if with_ones:
        made = torch.ones(shape, dtype=dtype, device=device)
    else:
        made = torch.randn(shape, dtype=torch.float32, device=device).to(dtype)
    return grown(made) if spec.requires_grad else made


def grown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one that has a history."""
    return tensor.requires_grad_(True) * 1
