"""`torch.vmap` in opened code, as one call in the graph.

Inside vmap tensors have no storage and no size of their own that a trace could
follow, so the mapped function is not looked into. What it closes over travels as
arguments (see `structure.branch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Mapped", "function_modes"]


def function_modes() -> list[TorchFunctionMode]:
    """Return the modes that see torch functions now, the outermost first."""
    stack: Any = torch.overrides._get_current_function_mode_stack
    return list(stack())


class Mapped:
    """A callable that runs a function under `torch.vmap`, and under the modes around it."""

    def __init__(self, modes: Sequence[TorchFunctionMode]) -> None:
        self._modes = tuple(modes)
        self.__name__ = self.__qualname__ = "vmap"
        self.__module__ = __name__

    def __call__(
        self, function: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        active = function_modes()
        with ExitStack() as stack:
            for mode in self._modes:
                if mode not in active:
                    stack.enter_context(mode)
            mapped = torch.vmap(
                function, in_dims, out_dims, randomness=randomness, chunk_size=chunk_size
            )
            return mapped(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mapped:
        return self
