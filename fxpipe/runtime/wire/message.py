"""The messages that a rank owes its peers in every step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.runtime.wire.packing import Packing
from fxpipe.runtime.wire.transport import Incoming, TensorShape, Transport

__all__ = ["Half", "Unpacked"]


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
            tensors = [packing.pack(tensor) for tensor in tensors]
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
