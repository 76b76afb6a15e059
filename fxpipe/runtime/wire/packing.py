"""What values of a boundary look like while they travel: narrower, or a share of them per rank.

A packing changes tensors before they are sent and gives them back as they were after they have
arrived. Only values are packed: what a rank sends to drain has their sizes and means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fxpipe.errors import InputError
from fxpipe.runtime.wire.transport import TensorShape, as_bytes

__all__ = ["Narrow", "Packing", "Shares"]


class Packing(Protocol):
    """A way to pack."""

    def shape(self, shape: TensorShape) -> TensorShape:
        """That of a packed tensor."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def unpack(self, tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Narrow:
    """Wider floating-point tensors travel as `dtype`."""

    dtype: torch.dtype

    def shape(self, shape: TensorShape) -> TensorShape:
        sizes, dtype = shape
        is_wider = dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize
        return sizes, self.dtype if is_wider else dtype

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.shape(((), tensor.dtype))[1])

    def unpack(self, tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor:
        return tensor.to(shape[1])


class Shares:
    """Ranks of a tensor-parallel group hold the same values: each sends a share of them.

    The receivers, a group of their own of the same size, gather the shares. The first values are
    compared within the group, since values that differ would be mixed in silence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._compared: set[TensorShape] = set()

    def shape(self, shape: TensorShape) -> TensorShape:
        sizes, dtype = shape
        return (-(-torch.Size(sizes).numel() // self._group.size()),), dtype

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = (tuple(tensor.shape), tensor.dtype)
        if kind not in self._compared:
            self._compared.add(kind)
            self._compare(tensor)
        ((size,), _) = self.shape(kind)
        share = tensor.new_zeros(size)
        mine = tensor.reshape(-1)[self._group.rank() * size :][:size]
        share[: len(mine)] = mine
        return share

    def unpack(self, tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor:
        whole = tensor.new_empty(self._group.size() * tensor.numel())
        parts = as_bytes(whole).chunk(self._group.size())
        dist.all_gather(list(parts), as_bytes(tensor), self._group)
        return whole[: torch.Size(shape[0]).numel()].view(shape[0])

    def _compare(self, tensor: torch.Tensor) -> None:
        first = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(as_bytes(first), group=self._group, group_src=0)
        same = first == tensor
        if tensor.is_floating_point():  # sums of the same numbers may be rounded differently
            same = torch.isclose(first.float(), tensor.float(), 1e-2, 1e-5, equal_nan=True)
        differs = (~same.all()).to(torch.int32)
        dist.all_reduce(differs, dist.ReduceOp.MAX, self._group)
        if differs.item():
            raise InputError(
                f"a value of shape {list(tensor.shape)} differs between the ranks of tp_group, "
                "which are to send a share of it each: give tp_group only where all values at "
                "boundaries are the same on its ranks"
            )
