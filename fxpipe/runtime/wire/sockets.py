"""Carry small messages between ranks of one host over Unix-domain sockets.

gloo has a thread of its own for every transfer; waking it and waiting for its locks costs
more than a small message itself. Here the rank's own thread writes to a socket and reads
from it. Messages beyond `LARGEST` bytes and other hosts use the group's transport: both ends
know a message's size, so both choose the same way.

Nothing blocks but `wait` and `finish`. What a socket does not take at once is kept and
written on the way; whoever blocks goes on writing and reading meanwhile, so two ranks
never wait for each other. Each message begins with its size and the number of its call.

The sockets lie in a folder per rank that only its user may enter. A caller is known by the
address it calls from, which lies in its own such folder; so nobody has to say anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import Incoming, TensorShape, Transport, TransportError, as_dense

__all__ = ["LARGEST", "HostTransport", "Listener"]

LARGEST = 1 << 17
"""Bytes of the largest message that goes over a socket: a few must fit into its buffer."""

_HEADER = struct.Struct("<II")
_SLICE = 0.1  # seconds between two looks at whether waiting still makes sense
_PARTS = 1000  # of a message that the system takes at once
_CPU = torch.device("cpu")
_CLOSED = "the connection is closed"


class HostTransport:
    """A transport that prefers sockets where there are any. Peers are group ranks.

    `gave_up` is asked now and then while this rank waits.
    """

    def __init__(
        self,
        group: Transport,
        sockets: Mapping[int, socket.socket],
        gave_up: Callable[[], bool],
    ) -> None:
        self._group = group
        self._gave_up = gave_up
        self._deadline = Deadline(0.0)
        self._behind: set[_Wire] = set()
        self._wires = {
            peer: _Wire(peer, made, self._behind, weakref.WeakMethod(self._block))
            for peer, made in sockets.items()
        }
        self._closed = weakref.finalize(self, _close_all, list(sockets.values()))
        self._closed.atexit = False

    def begin(self, deadline: Deadline, number: int) -> None:
        self._group.begin(deadline, number)
        self._deadline = deadline
        for wire in self._wires.values():
            wire.number = number & 0xFFFFFFFF

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> Any:
        wire = self._wires.get(peer)
        if wire is None:
            return self._group.send(peer, tensors, lane)
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        if size > LARGEST:
            return self._group.send(peer, tensors, lane)
        if self._behind:
            self._write()
        wire.send(tensors, size)
        return None

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming:
        wire = self._wires.get(peer)
        if wire is None:
            return self._group.recv(peer, shapes, device, lane)
        size = _size(tuple(shapes))
        if size > LARGEST:
            return self._group.recv(peer, shapes, device, lane)
        if self._behind:
            self._write()
        made = [torch.empty(shape, dtype=dtype, device=_CPU) for shape, dtype in shapes]
        return wire.recv(made, size)

    def release(self, handle: Any) -> None:
        self._group.release(handle)

    def held(self) -> int:
        return self._group.held() + sum(wire.held() for wire in self._behind)

    def finish(self) -> None:
        self._group.finish()
        while self._behind:
            self._block(next(iter(self._behind)).peer)

    def abandon(self) -> None:
        self._group.abandon()

    def close(self) -> None:
        self._group.close()
        self._behind.clear()
        self._closed()

    def _write(self) -> None:
        for wire in tuple(self._behind):
            wire.write()

    def _block(self, peer: int) -> None:
        """Wait until something can be read or written, and do it."""
        poll = select.poll()
        by_number = {}
        for wire in self._wires.values():
            wanted = wire.wanted()
            if wanted:
                number = wire.fileno()
                by_number[number] = wire
                poll.register(number, wanted)
        left = self._deadline.left()
        found = poll.poll(min(left, _SLICE) * 1000)
        for number, events in found:
            wire = by_number[number]
            if events & select.POLLOUT:
                wire.write()
            if events & ~select.POLLOUT:
                wire.read()
        if found:
            return
        if self._gave_up():
            raise TransportError(peer, "the call was given up", timed_out=False)
        if left <= 0:
            text = f"timed out after {self._deadline.seconds:g} s"
            raise TransportError(peer, text, timed_out=True)


class _Wire:
    """One socket: what is still to be written, and the receives that wait for data."""

    def __init__(
        self,
        peer: int,
        made: socket.socket,
        behind: set[_Wire],
        block: weakref.WeakMethod[Callable[[int], None]],
    ) -> None:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
        self.peer = peer
        self.number = 0
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
        dense = [as_dense(t) for t in tensors]
        parts = [_HEADER.pack(size, self.number), *[_memory(t) for t in dense if t.numel()]]
        done = 0
        if not self._queue:
            done = self._put(parts)
            if done == size + _HEADER.size:
                return
        # The tensors are kept with the bytes that are left of them.
        self._queue.extend((dense, view) for view in _without(parts, done))
        self._behind.add(self)
        if len(parts) > _PARTS:
            self.write()

    def held(self) -> int:
        return len({id(owner) for owner, _ in self._queue})

    def write(self) -> None:
        """Write what the socket takes."""
        while self._queue:
            done = self._put([view for _, view in islice(self._queue, _PARTS)])
            if done == 0:
                return
            while done:
                owner, view = self._queue.popleft()
                if done < len(view):
                    self._queue.appendleft((owner, view[done:]))
                done = max(done - len(view), 0)
        self._behind.discard(self)

    def _put(self, parts: Sequence[Any]) -> int:
        try:
            return self._socket.sendmsg(parts[:_PARTS])
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
            got, _, _, _ = self._socket.recvmsg_into(first.buffers[:_PARTS])
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
        while not receipt.is_done:
            if not self.read():
                block = self._block()
                if block is None:
                    raise TransportError(self.peer, _CLOSED, timed_out=False)
                block(self.peer)


class _Receipt:
    """One message on its way to this rank."""

    __slots__ = ("_header", "_left", "_said", "_size", "_tensors", "_wire", "buffers", "is_done")

    def __init__(self, wire: _Wire, tensors: list[torch.Tensor], size: int) -> None:
        self._wire = wire
        self._tensors = tensors
        self._size = size
        self._said = (size, wire.number)
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
        if self._left <= self._size:
            said = _HEADER.unpack(self._header)
            if said != self._said:
                raise TransportError(
                    self._wire.peer,
                    f"a message of {said[0]} bytes of call {said[1]} came where {self._size} "
                    f"bytes of call {self._said[1]} were agreed",
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


class Listener:
    """Where the other ranks of this host can call this one, until all have called."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="fxpipe-", dir=_short_folder())
        try:
            self._listener = _listen(f"{self.folder}/here")
        except BaseException:
            self.close()
            raise

    def connect(
        self, rank: int, folders: Mapping[int, str], deadline: Deadline, look: Callable[[], None]
    ) -> dict[int, socket.socket]:
        """A socket for each of the other ranks, whose folders are given; all of them call this.

        `look` is called now and then and may raise.
        """
        made: dict[int, socket.socket] = {}
        callers = {f"{folder}/{rank}": peer for peer, folder in folders.items() if peer < rank}
        try:
            for peer, folder in folders.items():
                if peer > rank:
                    made[peer] = one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    one.bind(f"{self.folder}/{peer}")
                    one.settimeout(max(deadline.left(), 0.01))
                    one.connect(f"{folder}/here")
            self._listener.settimeout(_SLICE)
            while len(made) < len(folders):
                try:
                    one, address = self._listener.accept()
                except TimeoutError:
                    look()
                    if deadline.left() == 0.0:
                        raise
                    continue
                peer = callers.get(address, -1)
                if peer < 0:
                    one.close()
                else:
                    made[peer] = one
        except BaseException:
            _close_all(list(made.values()))
            raise
        return made

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _short_folder() -> str:
    """Where temporary folders go; a socket's address has room for about 100 characters."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) < 60 else "/tmp"
