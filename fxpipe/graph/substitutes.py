"""Functions that fake tensors cannot run, and others that do the same.

`torch.tensor([a, b])` of tensors reads their values one by one; stacking them does
not, and says the same.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.graph.structure import has_tensor

__all__ = ["stacked", "substitute"]


def substitute(func: Any, args: Any) -> Any:
    """Return the function to run, and to write down, in place of another."""
    if func in (torch.tensor, torch.as_tensor) and args and type(args[0]) in (tuple, list):
        return stacked if has_tensor(args[0]) else func
    return func


def stacked(
    data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
) -> torch.Tensor:
    """Return what `torch.tensor` makes of nested lists of numbers and 0-d tensors."""
    made = _stacked(data).detach().to(device=device, dtype=dtype)
    return made.requires_grad_() if requires_grad else made


def _stacked(data: Any) -> torch.Tensor:
    if not isinstance(data, (tuple, list)):
        return torch.as_tensor(data)
    parts = [_stacked(part) for part in data]
    kind = parts[0].dtype
    for part in parts[1:]:
        kind = torch.promote_types(kind, part.dtype)
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.stack([part.to(device=device, dtype=kind) for part in parts])
