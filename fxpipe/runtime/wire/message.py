"""The messages that a rank owes its peers in every step of a plan, and how values are packed.

A packing changes tensors before they are sent and gives them back as they were after they have
arrived: narrower, or from a share of them per rank. Only values are packed: what a rank sends to
drain has their sizes and means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpipe.errors import InputError
from fxpipe.runtime.wire.transport import Incoming, TensorShape, Transport, as_bytes

__all__ = [
    "Half",
    "Narrow",
    "Packing",
    "Shares",
    "Unpacked",
]


class Packing(Protocol):
    """A way to pack."""

    def shape(self, shape: TensorShape) -> TensorShape:
        """That of a packed tensor."""

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What travels of a message."""

    def unpack(self, tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Narrow:
    """Wider floating-point tensors travel as `dtype`."""

    dtype: torch.dtype

    def shape(self, shape: TensorShape) -> TensorShape:
        sizes, dtype = shape
        is_wider = dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize
        return sizes, self.dtype if is_wider else dtype

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.shape(((), tensor.dtype))[1]) for tensor in tensors]

    def unpack(self, tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor:
        return tensor.to(shape[1])


class Shares:
    """Ranks of a tensor-parallel group hold the same values: each sends a share of them.

    The receivers, a group of their own of the same size, gather the shares. The first message is
    compared within the group, since values that differ would be mixed in silence. So activations
    and gradients of each edge need one of these each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._compared: set[tuple[TensorShape, ...]] = set()

    def shape(self, shape: TensorShape) -> TensorShape:
        sizes, dtype = shape
        return (-(-torch.Size(sizes).numel() // self._group.size()),), dtype

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kind = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if kind not in self._compared:
            self._compared.add(kind)
            for tensor in tensors:
                self._compare(tensor)
        return [self._share(tensor) for tensor in tensors]

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        ((size,), _) = self.shape((tuple(tensor.shape), tensor.dtype))
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
        if tensor.is_floating_point() and tensor.numel():
            # Sums of the same numbers may be rounded differently. Gradients may all be tiny.
            one, other = first.float(), tensor.float()
            close = 1e-2 * one.nan_to_num(0.0, 0.0, 0.0).abs().amax()
            same = (one == other) | (one.isnan() & other.isnan()) | ((one - other).abs() <= close)
        differs = (~same.all()).to(torch.int32)
        dist.all_reduce(differs, dist.ReduceOp.MAX, self._group)
        if differs.item():
            raise InputError(
                f"a value of shape {list(tensor.shape)} differs between the ranks of tp_group, "
                "which are to send a share of it each: give tp_group only where all values at "
                "boundaries are the same on its ranks"
            )


class Half:
    """This rank's end of a message. Its tensors are packed one way after the other."""

    __slots__ = ("_ends", "_steps", "_transport", "is_send")

    def __init__(
        self,
        transport: Transport,
        peer: int,
        shapes: Sequence[TensorShape],
        device: torch.device,
        lane: int = 0,
        packings: Sequence[Packing] = (),
        *,
        is_send: bool,
    ) -> None:
        self._transport, self.is_send = transport, is_send
        self._steps = []
        for packing in packings:
            self._steps.append((packing, shapes))
            shapes = [packing.shape(shape) for shape in shapes]
        self._ends = (peer, shapes, device, lane)

    def post(self, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Send the tensors, or receive; what the transport gives for it."""
        if not self.is_send:
            incoming = self._transport.recv(*self._ends)
            return Unpacked(incoming, self._steps) if self._steps else incoming
        for packing, _ in self._steps:
            tensors = packing.pack(tensors)
        peer, _, _, lane = self._ends
        return self._transport.send(peer, tensors, lane)

    def drain(self) -> Incoming | None:
        """Send or receive something of the same size, which nobody will look at."""
        peer, shapes, device, lane = self._ends
        if not self.is_send:
            return self._transport.recv(peer, shapes, device, lane)
        empty = [torch.zeros(sizes, dtype=dtype, device=device) for sizes, dtype in shapes]
        self._transport.send(peer, empty, lane)
        return None


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A packed message on its way, with the shapes of its tensors before each packing."""

    incoming: Incoming
    steps: Sequence[tuple[Packing, Sequence[TensorShape]]]

    @property
    def peer(self) -> int:
        return self.incoming.peer

    def wait(self) -> list[torch.Tensor]:
        arrived = self.incoming.wait()
        for packing, shapes in reversed(self.steps):
            pairs = zip(arrived, shapes, strict=True)
            arrived = [packing.unpack(tensor, shape) for tensor, shape in pairs]
        return arrived
