"""Write down which attention kernels a model calls, and with what."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["KernelCalls"]

ATTENTION = nn.functional.scaled_dot_product_attention


class KernelCalls(TorchFunctionMode):
    """Each call of the attention kernel in order, with sizes in place of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            given = [*args, *(kwargs[name] for name in sorted(kwargs))]
            self.calls.append([tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in given])
        return func(*args, **kwargs)
