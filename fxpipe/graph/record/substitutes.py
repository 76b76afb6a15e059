"""Functions that fake tensors cannot run, and others that do the same.

`torch.tensor([a, b])` of tensors reads their values one by one, as does an index that is
a list of tensors; stacking them does not, and says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpipe.graph.nested import has_tensor

__all__ = ["stacked", "stacked_indices", "substitute"]


def substitute(func: Any, args: Any) -> Any:
    """Return the function to run, and to write down, in place of another."""
    if func in (torch.tensor, torch.as_tensor) and args and type(args[0]) in (tuple, list):
        return stacked if has_tensor(args[0]) else func
    return func


def stacked_indices(func: Any, args: Any, stack: Callable[[Any], Any]) -> Any:
    """Return the arguments of a call; lists of tensors in an index are stacked by `stack`."""
    if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__") or len(args) < 2:
        return args
    tensor, index, *rest = args
    parts = index if type(index) is tuple else (index,)
    if not any(_is_list_of_tensors(part) for part in parts):
        return args
    made = tuple(stack(part) if _is_list_of_tensors(part) else part for part in parts)
    return (tensor, made if type(index) is tuple else made[0], *rest)


def _is_list_of_tensors(value: Any) -> bool:
    return type(value) in (tuple, list) and has_tensor(value)


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
