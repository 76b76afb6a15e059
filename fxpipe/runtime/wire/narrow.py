"""Let values cross the boundary in a smaller dtype than they are computed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import Incoming, TensorShape, Transport

__all__ = ["NarrowTransport"]


class NarrowTransport:
    """Sends wider floating-point tensors as `dtype`, and gives received ones their own back."""

    def __init__(self, transport: Transport, dtype: torch.dtype) -> None:
        self._transport, self._dtype = transport, dtype
        self.release, self.held, self.finish = transport.release, transport.held, transport.finish
        self.abandon, self.close = transport.abandon, transport.close

    def begin(self, deadline: Deadline, number: int) -> None:
        self._transport.begin(deadline, number)

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> Any:
        return self._transport.send(peer, [t.to(self._on_wire(t.dtype)) for t in tensors], lane)

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming:
        narrow = [(shape, self._on_wire(dtype)) for shape, dtype in shapes]
        incoming = self._transport.recv(peer, narrow, device, lane)
        return _Widened(incoming, [dtype for _, dtype in shapes])

    def _on_wire(self, dtype: torch.dtype) -> torch.dtype:
        is_wider = dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize
        return self._dtype if is_wider else dtype


class _Widened:
    __slots__ = ("_dtypes", "_incoming", "peer")

    def __init__(self, incoming: Incoming, dtypes: list[torch.dtype]) -> None:
        self._incoming, self._dtypes = incoming, dtypes
        self.peer = incoming.peer

    def wait(self) -> list[torch.Tensor]:
        arrived = self._incoming.wait()
        return [t.to(dtype) for t, dtype in zip(arrived, self._dtypes, strict=True)]
