"""Move tensors between ranks: over a process group, or within one process.

A `Transport` posts sends and receives; neither blocks. `Incoming.wait` blocks
until the tensors are there. The two ends of a rank pair post the same messages
in the same order: the program is lowered that way and validated.

The in-process transport hands tensors over by reference. The process-group
transport works on any backend; it keeps a sent tensor alive until the send is
known to be complete, because backends read its memory late.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = [
    "Incoming",
    "LocalChannels",
    "LocalTransport",
    "ProcessGroupTransport",
    "TensorShape",
    "Transport",
    "TransportError",
]

TensorShape = tuple[tuple[int, ...], torch.dtype]


class TransportError(Exception):
    """A transfer failed below us; carries the rank at the other end."""

    def __init__(self, peer: int, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.peer = peer
        self.timed_out = timed_out


class Incoming(Protocol):
    """Tensors on their way to this rank from rank `peer`."""

    @property
    def peer(self) -> int: ...

    def wait(self) -> list[torch.Tensor]: ...


class Transport(Protocol):
    """What the executor needs from the outside world."""

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> Any:
        """Post a message; the handle goes to `release` once the peer has surely read it."""

    def recv(self, peer: int, shapes: Sequence[TensorShape], device: torch.device) -> Incoming: ...

    def release(self, handle: Any) -> None: ...

    def finish(self) -> None:
        """Wait until everything sent has been read, or needs this rank no longer."""

    def forget(self, peer: int) -> None:
        """Forget what is open with a rank that is gone."""

    def abandon(self) -> None:
        """Forget what is open, after a transfer is known to have failed."""


class LocalChannels:
    """The wires between the ranks of one process."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], deque[list[torch.Tensor]]] = {}

    def queue(self, source: int, target: int) -> deque[list[torch.Tensor]]:
        return self._queues.setdefault((source, target), deque())

    def clear(self) -> None:
        self._queues.clear()


class _LocalIncoming:
    __slots__ = ("_position", "_queue", "peer")

    def __init__(self, queue: _Ordered, peer: int) -> None:
        self.peer = peer
        self._queue = queue
        self._position = queue.posted
        queue.posted += 1

    def wait(self) -> list[torch.Tensor]:
        return self._queue.take(self._position)


class _Ordered:
    """Matches the n-th receive with the n-th send although reads come in any order."""

    __slots__ = ("_arrived", "_next", "_queue", "posted")

    def __init__(self, queue: deque[list[torch.Tensor]]) -> None:
        self._queue = queue
        self._arrived: dict[int, list[torch.Tensor]] = {}
        self._next = 0
        self.posted = 0

    def take(self, position: int) -> list[torch.Tensor]:
        while position not in self._arrived:
            self._arrived[self._next] = self._queue.popleft()
            self._next += 1
        return self._arrived.pop(position)


class LocalTransport:
    """One rank's end of the wires of `LocalChannels`."""

    def __init__(self, rank: int, channels: LocalChannels) -> None:
        self._rank = rank
        self._channels = channels
        self._ordered: dict[int, _Ordered] = {}

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        self._channels.queue(self._rank, peer).append(list(tensors))

    def recv(self, peer: int, shapes: Sequence[TensorShape], device: torch.device) -> Incoming:
        del shapes, device
        ordered = self._ordered.get(peer)
        if ordered is None:
            ordered = self._ordered[peer] = _Ordered(self._channels.queue(peer, self._rank))
        return _LocalIncoming(ordered, peer)

    def release(self, handle: Any) -> None:
        del handle

    def finish(self) -> None:
        self._ordered.clear()

    def forget(self, peer: int) -> None:
        self._ordered.pop(peer, None)

    def abandon(self) -> None:
        self._ordered.clear()


class _GroupIncoming:
    __slots__ = ("_tensors", "_transport", "_works", "peer")

    def __init__(
        self,
        transport: ProcessGroupTransport,
        peer: int,
        tensors: list[torch.Tensor],
        works: list[dist.Work],
    ) -> None:
        self._transport = transport
        self.peer = peer
        self._tensors = tensors
        self._works = works

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            self._transport.complete(work, self.peer)
        return self._tensors


class _Outgoing:
    __slots__ = ("peer", "tensors", "works")

    def __init__(self, peer: int, tensors: list[torch.Tensor], works: list[dist.Work]) -> None:
        self.peer = peer
        self.tensors = tensors
        self.works = works


class ProcessGroupTransport:
    """Point-to-point messages over a torch process group. Peers are group ranks."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group = group
        self._timeout = datetime.timedelta(seconds=timeout)
        self._open: set[_Outgoing] = set()

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> _Outgoing:
        dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        try:
            works = [self._group.send([_bits(t)], peer, 0) for t in dense]
        except RuntimeError as error:
            raise TransportError(peer, str(error), timed_out=False) from error
        outgoing = _Outgoing(peer, dense, works)
        self._open.add(outgoing)
        return outgoing

    def recv(self, peer: int, shapes: Sequence[TensorShape], device: torch.device) -> Incoming:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        try:
            works = [self._group.recv([_bits(t)], peer, 0) for t in tensors]
        except RuntimeError as error:
            raise TransportError(peer, str(error), timed_out=False) from error
        return _GroupIncoming(self, peer, tensors, works)

    def complete(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            text = str(error)
            raise TransportError(peer, text, timed_out="imed out" in text) from error

    def release(self, handle: _Outgoing) -> None:
        if handle in self._open:
            self._open.discard(handle)
            for work in handle.works:
                self.complete(work, handle.peer)

    def finish(self) -> None:
        while self._open:
            self.release(next(iter(self._open)))

    def forget(self, peer: int) -> None:
        self._open = {one for one in self._open if one.peer != peer}

    def abandon(self) -> None:
        self._open.clear()

    def warm_up(self, peers: Sequence[int], rank: int, device: torch.device) -> None:
        """Exchange one byte with each peer, in the order given, the same on all ranks.

        Backends that connect lazily (NCCL) set up a communicator for a pair when it
        is first used, and two ranks that do so in different orders wait forever.
        """
        for peer in peers:
            token = torch.zeros(1, dtype=torch.uint8, device=device)
            if rank < peer:
                self._group.send([token], peer, 0).wait()
                self._group.recv([token], peer, 0).wait()
            else:
                self._group.recv([token], peer, 0).wait()
                self._group.send([token], peer, 0).wait()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Backends know few dtypes; complex travels as its real view.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
