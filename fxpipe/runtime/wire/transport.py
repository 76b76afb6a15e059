"""Move tensors between ranks: over a gloo group of our own, or within one process.

A `Transport` posts sends and receives; neither blocks. `Incoming.wait` blocks until the tensors
are there, at most until the deadline of the call that was last begun. The two ends of a rank pair
post the same messages in the same order: the program is lowered that way and validated.

The in-process transport hands tensors over by reference. The gloo transport keeps a sent tensor
alive until the send is known to be complete, because gloo reads its memory late. Accelerators
have a transport of their own (`stream_transport`).
"""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpipe.runtime.wire.failure import Deadline

__all__ = [
    "GroupTransport",
    "Incoming",
    "LocalChannels",
    "LocalTransport",
    "TensorShape",
    "Transport",
    "TransportError",
    "as_bytes",
    "close_connections",
]

TensorShape = tuple[tuple[int, ...], torch.dtype]

_UNUSED_TAG = 2**31 - 1


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

    def begin(self, deadline: Deadline, number: int) -> None:
        """A call begins: every message says its number, every wait ends with its deadline."""

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> Any:
        """Post a message; the handle goes to `release` once the peer has surely read it.

        Messages of different lanes do not wait for each other: activations, gradients.
        """

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming: ...

    def release(self, handle: Any) -> None: ...

    def held(self) -> int:
        """The number of sent messages whose memory is still kept."""

    def finish(self) -> None:
        """Wait until everything sent has been read, or needs this rank no longer."""

    def abandon(self) -> None:
        """Forget what is open, after a call has failed."""

    def close(self) -> None:
        """End all connections; the other ends learn of it. Blocked waits end, in any thread."""


class LocalChannels:
    """The wires between the ranks of one process: the n-th receive gets the n-th send."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.sent: Counter[tuple[int, int]] = Counter()
        self.posted: Counter[tuple[int, int]] = Counter()

    def clear(self) -> None:
        self.messages.clear()
        self.sent.clear()
        self.posted.clear()


class _LocalIncoming:
    __slots__ = ("_channels", "_key", "peer")

    def __init__(self, channels: LocalChannels, key: tuple[int, int, int]) -> None:
        self._channels = channels
        self._key = key
        self.peer = key[0]

    def wait(self) -> list[torch.Tensor]:
        return self._channels.messages.pop(self._key)


class LocalTransport:
    """One rank's end of the wires of `LocalChannels`."""

    def __init__(self, rank: int, channels: LocalChannels) -> None:
        self._rank = rank
        self._channels = channels

    def begin(self, deadline: Deadline, number: int) -> None:
        del deadline, number

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> None:
        del lane
        pair = (self._rank, peer)
        self._channels.messages[*pair, self._channels.sent[pair]] = list(tensors)
        self._channels.sent[pair] += 1

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming:
        del shapes, device, lane
        pair = (peer, self._rank)
        self._channels.posted[pair] += 1
        return _LocalIncoming(self._channels, (*pair, self._channels.posted[pair] - 1))

    def release(self, handle: Any) -> None:
        del handle

    def held(self) -> int:
        return len(self._channels.messages)

    def finish(self) -> None: ...

    def abandon(self) -> None:
        self._channels.clear()

    def close(self) -> None:
        self._channels.clear()


class _GroupIncoming:
    __slots__ = ("_tensors", "_transport", "_works", "peer")

    def __init__(
        self,
        transport: GroupTransport,
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


class GroupTransport:
    """Messages over a gloo group that nobody else uses. Peers are group ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._deadline = Deadline(0.0)
        self._tag = 0
        self._open: set[_Outgoing] = set()

    def begin(self, deadline: Deadline, number: int) -> None:
        self._deadline = deadline
        self._tag = number % _UNUSED_TAG

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> _Outgoing:
        del lane  # gloo's messages have no queue in which they could wait for each other
        dense = [as_dense(t) for t in tensors]
        works = self._post(self._group.send, peer, dense)
        outgoing = _Outgoing(peer, dense, works)
        self._open.add(outgoing)
        return outgoing

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming:
        del lane
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        works = self._post(self._group.recv, peer, tensors)
        return _GroupIncoming(self, peer, tensors, works)

    def _post(self, post: Any, peer: int, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        try:
            return [post([as_bytes(t)], peer, self._tag) for t in tensors]
        except RuntimeError as error:
            if any(word in str(error) for word in ("onnection", "clos", "roken", "imed out")):
                raise TransportError(peer, str(error), timed_out=False) from error
            raise

    def complete(self, work: dist.Work, peer: int) -> None:
        left = self._deadline.left()
        try:
            work.wait(self._deadline.timeout)
        except RuntimeError as error:
            # Backends word it differently; the clock does not.
            timed_out = left > 0 and self._deadline.left() == 0.0
            raise TransportError(peer, str(error), timed_out=timed_out) from error

    def release(self, handle: _Outgoing) -> None:
        if handle in self._open:
            self._open.discard(handle)
            for work in handle.works:
                self.complete(work, handle.peer)

    def held(self) -> int:
        return len(self._open)

    def finish(self) -> None:
        while self._open:
            self.release(next(iter(self._open)))

    def abandon(self) -> None:
        self._open.clear()

    def close(self) -> None:
        self._open.clear()
        close_connections(self._group)


def close_connections(gloo: Any) -> None:
    """Close what a gloo group has open: whoever waits in it raises, here and on the other ranks.

    gloo wakes nobody on abort, but a wait that times out closes every connection of its group.
    """
    with contextlib.suppress(RuntimeError):
        peer = (gloo.rank() + 1) % gloo.size()
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        work = gloo.recv([nothing], peer, _UNUSED_TAG)
        work.wait(datetime.timedelta(milliseconds=1))


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as they have to lie in memory to travel.

    What is conjugated or negated by a flag is written out: the flag would stay behind.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: backends know few dtypes, but all of them know bytes."""
    return tensor.reshape(-1).view(torch.uint8)
