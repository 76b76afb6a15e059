"""Cut one value along its batch dimension, and put such pieces together again.

A value is a tensor, a `DTensor` or a flex attention `BlockMask`. Nothing is copied; pieces
of what requires a gradient are views, through which gradients flow back.

A `DTensor` that is sharded along its batch dimension is cut on every rank by itself,
without communication: a microbatch then holds some rows of every shard, not the first
rows of the whole. `Deal` has the sizes of the shards, so that a caller can see whether
two values were dealt alike.

Any other object (a numpy array, a key-value cache, an unregistered class) cannot be cut, and
repeating it is only safe if nothing in it goes with the rows of the batch: `hidden_rows`.
"""

from __future__ import annotations

import copy
import enum
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from fxpipe.errors import InputError

__all__ = [
    "Deal",
    "cut",
    "deal_of",
    "describe",
    "even_parts",
    "hidden_rows",
    "is_dtensor",
    "is_value",
    "join",
    "num_dims",
    "num_rows",
]


@dataclass(frozen=True, slots=True)
class Deal:
    """How rows are dealt: `rows` counts those of each microbatch, `shards` those of each shard."""

    rows: tuple[int, ...]
    shards: tuple[int, ...]


def even_parts(size: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most, larger ones first: 10 in 4 is (3, 3, 2, 2)."""
    return tuple(size // parts + (index < size % parts) for index in range(parts))


def is_value(leaf: Any) -> bool:
    """Whether this leaf is of a kind that can have a batch dimension."""
    return isinstance(leaf, torch.Tensor | BlockMask)


def is_dtensor(value: Any) -> bool:
    # Without an import: if nobody has loaded the module, nobody has made a DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def num_dims(value: Any) -> int:
    """How many dimensions can be split: all of a tensor's, the batch dimension of a mask."""
    if isinstance(value, BlockMask):
        return 1 if value.kv_num_blocks.dim() == 3 else 0
    return int(value.dim())


def num_rows(value: Any, dim: int = 0) -> int:
    """The size along a dimension that `num_dims` counts."""
    tensor = value.kv_num_blocks if isinstance(value, BlockMask) else value
    return int(tensor.size(dim))


def describe(value: Any) -> str:
    """What an error message says about a leaf: `float32[8, 3]`, `float 2.0`."""
    if isinstance(value, BlockMask):
        return f"BlockMask{list(value.shape)}"
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if value.is_nested:  # sizes of its other dimensions may not exist
            return f"nested {name}[{value.size(0)}, ...]"
        return f"{name}{list(value.shape)}"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float | complex | str):
        return f"{type(value).__name__} {value!r:.60}"
    return f"a {type(value).__name__}"


def deal_of(value: Any, dim: int, chunks: int) -> Deal:
    """How `value` is dealt to `chunks` microbatches along `dim`, by its shape alone.

    Raises:
        InputError: the value's layout cannot be cut along this dimension; without its path.
    """
    if isinstance(value, BlockMask):
        return Deal(even_parts(num_rows(value), chunks), (num_rows(value),))
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise InputError(f"a {kind} tensor cannot be split without a copy: pass a dense tensor")
    size = int(value.size(dim))
    if not is_dtensor(value):
        return Deal(even_parts(size, chunks), (size,))
    shards = _shards(size, value, dim)
    dealt = list(zip(*(even_parts(shard, chunks) for shard in shards), strict=True))
    # Always so with one mesh dimension; with two, uneven shards may be dealt in a way
    # that no DTensor of that size has.
    if any(parts != _shards(sum(parts), value, dim) for parts in dealt):
        numbers = ", ".join(map(str, shards))
        raise InputError(
            f"a DTensor with shards of {numbers} rows cannot be split into {chunks} shard by "
            "shard: redistribute it first, or choose a batch size that divides evenly"
        )
    return Deal(tuple(map(sum, dealt)), shards)


def cut(value: Any, dim: int, rows: Sequence[int]) -> list[Any]:
    """The pieces of `value` along `dim`, none copied; `value` itself if there is one piece."""
    if len(rows) == 1:
        return [value]
    if isinstance(value, BlockMask):
        return [_cut_mask(value, start, size) for start, size in _spans(rows)]
    if is_dtensor(value):
        return _cut_dtensor(value, dim, rows)
    if type(value) is torch.Tensor and not value.requires_grad:
        # Pieces share memory, but not a version counter: were they views, a model that
        # changes its input in place would, in the second microbatch, invalidate what
        # the first one saved for its backward.
        return list(torch.unsafe_split_with_sizes(value, tuple(rows), dim))
    return [value.narrow(dim, start, size) for start, size in _spans(rows)]


def join(values: Sequence[Any], dim: int) -> Any:
    """One tensor out of pieces that fit together; the inverse of `cut`.

    Raises:
        InputError: the pieces do not fit together; without their path.
    """
    if len(values) == 1:
        return values[0]
    if is_dtensor(values[0]):
        return _join_dtensors(values, dim)
    return torch.cat(tuple(values), dim)


def _spans(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in rows:
        yield start, size
        start += size


# ---------------------------------------------------------------------------- DTensor


def _shards(size: int, tensor: Any, dim: int) -> tuple[int, ...]:
    """Sizes of all shards of a DTensor along `dim`, computed, not communicated."""
    shards = [size]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard(dim):
            count = tensor.device_mesh.size(axis)
            # A mesh axis gives every rank but the last ones the same, rounded up.
            shards = [
                max(0, min(-(-shard // count), shard - index * -(-shard // count)))
                for shard in shards
                for index in range(count)
            ]
        elif getattr(placement, "dim", None) == dim:
            raise InputError(
                f"a DTensor with placement {placement} cannot be split along dimension {dim}: "
                "redistribute it first"
            )
    return tuple(shards)


def _cut_dtensor(tensor: Any, dim: int, rows: Sequence[int]) -> list[Any]:
    local = tensor.to_local()
    local_rows = rows
    if any(placement.is_shard(dim) for placement in tensor.placements):
        local_rows = even_parts(local.size(dim), len(rows))
    pieces = []
    for (start, size), whole in zip(_spans(local_rows), rows, strict=True):
        shape = list(tensor.shape)
        shape[dim] = whole
        pieces.append(
            _like(tensor, local.narrow(dim, start, size), torch.Size(shape), tensor.stride())
        )
    return pieces


def _join_dtensors(values: Sequence[Any], dim: int) -> Any:
    first = values[0]
    for value in values[1:]:
        if value.placements != first.placements or value.device_mesh != first.device_mesh:
            raise InputError(
                f"DTensors with placements {first.placements} and {value.placements} "
                "cannot be joined: redistribute them to the same placements"
            )
    shape = list(first.shape)
    shape[dim] = sum(value.size(dim) for value in values)
    dealt = zip(*(_shards(value.size(dim), value, dim) for value in values), strict=True)
    if tuple(map(sum, dealt)) != _shards(shape[dim], first, dim):
        raise InputError(
            f"DTensors of {', '.join(str(value.size(dim)) for value in values)} rows, sharded "
            f"along dimension {dim}, cannot be joined shard by shard: redistribute them first"
        )
    local = torch.cat([value.to_local() for value in values], dim)
    stride = torch.empty(shape, device="meta").stride()
    return _like(first, local, torch.Size(shape), stride)


def _like(tensor: Any, local: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Any:
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


# -------------------------------------------------------------------------- BlockMask


def _cut_mask(mask: BlockMask, start: int, size: int) -> BlockMask:
    piece = copy.copy(mask)
    for name, value in vars(mask).items():
        # Every tensor of a mask has the batch in front, or 1 for "the same in all rows".
        if isinstance(value, torch.Tensor) and value.size(0) > 1:
            setattr(piece, name, value.narrow(0, start, size))
    piece.mask_mod = _shifted(mask.mask_mod, start, mask.kv_num_blocks.device)
    return piece


def _shifted(mask_mod: Callable[..., Any], start: int, device: torch.device) -> Callable[..., Any]:
    # A tensor, not an int: a compiled kernel would be compiled anew for every int.
    offset = torch.full((), start, device=device)

    def shifted_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + offset, h, q_idx, kv_idx)

    return shifted_mask_mod


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
