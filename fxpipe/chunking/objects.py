"""Find out whether an object that is not a tree holds something with rows.

Such an object (a numpy array, a key-value cache, an unregistered class) cannot be split,
and repeating it is only safe if nothing in it goes with the rows of the batch.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from typing import Any

import torch

from fxpipe.chunking.values import describe

__all__ = ["hidden_rows"]

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.Generator, torch.nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


def hidden_rows(value: Any, depth: int = 4) -> str | None:
    """What an object that cannot be opened (an array, a cache) holds that has rows."""
    if isinstance(value, _PLAIN) or depth == 0:
        return None
    if isinstance(value, torch.Tensor):
        return describe(value) if value.dim() > 0 and value.size(0) > 1 else None
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and shape[0] != 1:
        return f"an array of shape {tuple(shape)}"
    return next(filter(None, (hidden_rows(part, depth - 1) for part in _parts(value))), None)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            slots = getattr(kind, "__slots__", ())
            names = [slots] if isinstance(slots, str) else slots
            yield from (getattr(value, name) for name in names if hasattr(value, name))
