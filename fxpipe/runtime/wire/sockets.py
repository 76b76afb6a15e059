"""Carry small messages between ranks of one host over sockets.

gloo has a thread of its own for every transfer; waking it and waiting for its locks costs
more than a small message itself. Here the rank's own thread writes to a socket and reads
from it. Messages beyond `LARGEST` bytes, other hosts and other devices use the process
group: both ends know a message's size, so both choose the same way.

Nothing blocks but `wait` and `finish`. What a socket does not take at once is kept and
written on the way; whoever blocks goes on writing and reading meanwhile, so two ranks
never wait for each other. A peer that is gone is known at once, by the end of its stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from fxpipe.runtime.wire.control import Control
from fxpipe.runtime.wire.transport import (
    Incoming,
    ProcessGroupTransport,
    TensorShape,
    TransportError,
)

__all__ = ["LARGEST", "HostTransport", "connect"]

LARGEST = 1 << 17
"""Bytes of the largest message that goes over a socket: a few must fit into its buffer."""

_HEADER = struct.Struct("<I")
_SLICE = 0.1  # seconds between two looks at whether waiting still makes sense
_PATIENCE = 30.0  # seconds for a call that has been made already to come in
_CLOSED = "the connection is closed"


class HostTransport:
    """A transport that prefers sockets where there are any. Peers are group ranks."""

    def __init__(
        self,
        group: ProcessGroupTransport,
        sockets: Mapping[int, socket.socket],
        timeout: float,
        gave_up: Callable[[], bool],
    ) -> None:
        self._group = group
        self._timeout = timeout
        self._gave_up = gave_up
        self._behind: set[_Wire] = set()
        self._wires = {
            peer: _Wire(peer, made, self._behind, weakref.WeakMethod(self._block))
            for peer, made in sockets.items()
        }
        self._closed = weakref.finalize(self, _close_all, list(sockets.values()))

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that a socket leads to."""
        return tuple(self._wires)

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> Any:
        wire = self._wires.get(peer)
        if wire is None:
            return self._group.send(peer, tensors)
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        if size > LARGEST:
            return self._group.send(peer, tensors)
        if self._behind:
            self._write()
        wire.send(tensors, size)
        return None

    def recv(self, peer: int, shapes: Sequence[TensorShape], device: torch.device) -> Incoming:
        wire = self._wires.get(peer)
        if wire is None:
            return self._group.recv(peer, shapes, device)
        size = _size(tuple(shapes))
        if size > LARGEST:
            return self._group.recv(peer, shapes, device)
        if self._behind:
            self._write()
        return wire.recv([torch.empty(shape, dtype=dtype) for shape, dtype in shapes], size)

    def release(self, handle: Any) -> None:
        self._group.release(handle)

    def finish(self) -> None:
        self._group.finish()
        start = time.monotonic()
        while self._behind:
            self._block(next(iter(self._behind)).peer, start)

    def forget(self, peer: int) -> None:
        self._group.forget(peer)
        if peer in self._wires:
            self._behind.discard(self._wires.pop(peer))

    def abandon(self) -> None:
        """Forget what is open; the other ends learn of it as of a lost connection."""
        self._group.abandon()
        self._behind.clear()
        self._closed()

    def warm_up(self, peers: Sequence[int], rank: int, device: torch.device) -> None:
        self._group.warm_up(peers, rank, device)

    def _write(self) -> None:
        for wire in tuple(self._behind):
            wire.write()

    def _block(self, peer: int, start: float) -> None:
        """Wait until something can be read or written, and do it."""
        poll = select.poll()
        by_number = {}
        for wire in self._wires.values():
            wanted = wire.wanted()
            if wanted:
                number = wire.fileno()
                by_number[number] = wire
                poll.register(number, wanted)
        left = self._timeout - (time.monotonic() - start)
        found = poll.poll(max(min(left, _SLICE), 0) * 1000)
        for number, events in found:
            wire = by_number[number]
            if events & select.POLLOUT:
                wire.write()
            if events & ~select.POLLOUT:
                wire.read()
        if found:
            return
        if self._gave_up():
            raise TransportError(peer, "the step was given up", timed_out=False)
        if left <= 0:
            raise TransportError(peer, f"timed out after {self._timeout:g} s", timed_out=True)


class _Wire:
    """One socket: what is still to be written, and the receives that wait for data."""

    def __init__(
        self,
        peer: int,
        made: socket.socket,
        behind: set[_Wire],
        block: weakref.WeakMethod[Callable[[int, float], None]],
    ) -> None:
        self.peer = peer
        self._socket = made
        self._behind = behind
        self._block = block
        self._queue: deque[tuple[Any, memoryview]] = deque()
        self._posted: deque[_Receipt] = deque()

    def fileno(self) -> int:
        number = self._socket.fileno()
        if number < 0:
            raise TransportError(self.peer, _CLOSED, timed_out=False)
        return number

    def wanted(self) -> int:
        return (select.POLLIN if self._posted else 0) | (select.POLLOUT if self._queue else 0)

    def send(self, tensors: Sequence[torch.Tensor], size: int) -> None:
        dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        parts = [_HEADER.pack(size), *[_memory(t) for t in dense if t.numel()]]
        done = 0
        if not self._queue:
            done = self._put(parts)
            if done == size + _HEADER.size:
                return
        # The tensors are kept with the bytes that are left of them.
        self._queue.extend((dense, view) for view in _without(parts, done))
        self._behind.add(self)

    def write(self) -> None:
        """Write what the socket takes."""
        while self._queue:
            owner, view = self._queue[0]
            done = self._put([view])
            if done < len(view):
                self._queue[0] = (owner, view[done:])
                return
            self._queue.popleft()
        self._behind.discard(self)

    def _put(self, parts: Sequence[Any]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransportError(self.peer, str(error), timed_out=False) from error

    def recv(self, tensors: list[torch.Tensor], size: int) -> _Receipt:
        receipt = _Receipt(self, tensors, size)
        self._posted.append(receipt)
        return receipt

    def read(self) -> bool:
        """Read what has arrived for the first receive; tell whether anything had."""
        first = self._posted[0]
        try:
            got, _, _, _ = self._socket.recvmsg_into(first.buffers)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransportError(self.peer, str(error), timed_out=False) from error
        if got == 0:
            raise TransportError(self.peer, "the connection was closed", timed_out=False)
        first.take(got)
        if first.is_done:
            self._posted.popleft()
        return True

    def wait(self, receipt: _Receipt) -> None:
        start = 0.0
        while not receipt.is_done:
            if not self.read():
                start = start or time.monotonic()
                block = self._block()
                if block is None:
                    raise TransportError(self.peer, _CLOSED, timed_out=False)
                block(self.peer, start)


class _Receipt:
    """One message on its way to this rank."""

    __slots__ = ("_header", "_left", "_size", "_tensors", "_wire", "buffers", "is_done")

    def __init__(self, wire: _Wire, tensors: list[torch.Tensor], size: int) -> None:
        self._wire = wire
        self._tensors = tensors
        self._size = size
        self._left = size + _HEADER.size
        self._header = bytearray(_HEADER.size)
        self.buffers: list[Any] = [self._header, *[_memory(t) for t in tensors if t.numel()]]
        self.is_done = False

    @property
    def peer(self) -> int:
        return self._wire.peer

    def wait(self) -> list[torch.Tensor]:
        if not self.is_done:
            self._wire.wait(self)
        return self._tensors

    def take(self, got: int) -> None:
        """Note that `got` more bytes have been written to the buffers."""
        self._left -= got
        if self._left == 0:
            self.is_done = True
            self.buffers = []
        else:
            self.buffers = _without(self.buffers, got)
        if self._left <= self._size and _HEADER.unpack(self._header)[0] != self._size:
            raise TransportError(
                self._wire.peer,
                f"a message of {_HEADER.unpack(self._header)[0]} bytes came where "
                f"{self._size} were agreed",
                timed_out=False,
            )


def _without(parts: Sequence[Any], count: int) -> list[memoryview]:
    """The parts without their first `count` bytes."""
    rest = []
    for part in parts:
        view = memoryview(part).cast("B")
        if count < len(view):
            rest.append(view[count:])
        count = max(count - len(view), 0)
    return rest


def _memory(tensor: torch.Tensor) -> Any:
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


@lru_cache(maxsize=4096)
def _size(shapes: tuple[TensorShape, ...]) -> int:
    total = 0
    for shape, dtype in shapes:
        count = dtype.itemsize
        for length in shape:
            count *= length
        total += count
    return total


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for made in sockets:
        made.close()


# Making the connections.


def connect(control: Control, *, is_wanted: bool) -> dict[int, socket.socket]:
    """Connect this rank with the ranks of the same host; all ranks call it.

    Returns a socket per peer. There are none if any rank does not want them, or cannot.
    """
    is_wanted = is_wanted and os.environ.get("FXPIPE_SOCKETS") != "0"
    name, secret = f"\0fxpipe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    listener = _listen(name) if is_wanted else None
    with contextlib.ExitStack() as stack:
        if listener is not None:
            stack.callback(listener.close)
        everyone = control.gather(None if listener is None else (_host(), name, secret))
        if listener is None or None in everyone:
            return {}
        here = everyone[control.rank][0]
        near = [r for r, found in enumerate(everyone) if found[0] == here and r != control.rank]
        made: dict[int, socket.socket] = {}
        for peer in near:
            if peer > control.rank:
                _, called, password = everyone[peer]
                with contextlib.suppress(OSError):
                    made[peer] = _call(called, password, control.rank)
        calls = control.gather(sorted(made))
        _answer(listener, secret, {r for r in near if control.rank in calls[r]}, made)
    for one in made.values():
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
    return made


def _host() -> str:
    """What ranks of one host, and no others, have in common."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{socket.gethostname()} {boot.read().strip()}"
    return socket.gethostname()


def _listen(name: str) -> socket.socket | None:
    if not sys.platform.startswith("linux"):
        return None  # only Linux has socket names that leave nothing behind
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(128)
    except OSError:
        listener.close()
        return None
    return listener


def _call(name: str, secret: bytes, rank: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(name)
        made.sendall(secret + _HEADER.pack(rank))
    except OSError:
        made.close()
        raise
    return made


def _answer(
    listener: socket.socket, secret: bytes, waiting: set[int], made: dict[int, socket.socket]
) -> None:
    """Take the calls of the ranks that said they have called, and no others."""
    listener.settimeout(_PATIENCE)
    while waiting:
        one, _ = listener.accept()
        one.settimeout(_PATIENCE)
        said = one.recv(len(secret) + _HEADER.size, socket.MSG_WAITALL)
        is_whole = len(said) == len(secret) + _HEADER.size
        rank = _HEADER.unpack(said[len(secret) :])[0] if is_whole else -1
        if said[: len(secret)] != secret or rank not in waiting:
            one.close()
            continue
        waiting.discard(rank)
        made[rank] = one
