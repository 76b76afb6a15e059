"""Move tensors over communicators whose work is done by the device, not by the host.

Waiting for a message makes the device wait for it; the host goes on at once and runs ahead of the
device. So nothing here waits with a time-out, and nothing raises when a peer is gone. The
host looks at the transfers instead, without blocking:

* when it posts or awaits the next one, to let go of tensors whose send is done;
* at the end of a step, until all of them are done. Ranks then confirm the step to
  each other, so a confirmed step is one whose messages have all arrived;
* in the thread that watches a call: once its deadline is over, the oldest transfer that is not
  done says who is silent, and `close` aborts our communicators. That ends whatever the device or
  the host still waits for; the results are worthless, and the call raises.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.program.play.queues import Streams
from fxpipe.runtime.wire.communicators import matchings, with_others
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import Incoming, TensorShape, TransportError, as_bytes, as_dense

__all__ = ["StreamTransport"]

_PAUSE = 0.0002  # seconds between two looks at what is not done yet


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message on its way, with the memory that it needs until it is done."""

    peer: int
    tensors: list[torch.Tensor]
    works: list[dist.Work]
    number: int

    @property
    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True, slots=True)
class _Arriving(_Transfer):
    """A message on its way to this rank."""

    tidy: Callable[[], None]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        self.tidy()
        return self.tensors


class StreamTransport:
    """One rank's end of the pipeline's own communicators, one per lane."""

    def __init__(
        self,
        lanes: Sequence[dist.ProcessGroup],
        streams: Streams,
        gave_up: Callable[[], bool],
    ) -> None:
        self.streams = streams
        self._lanes: Sequence[Any] = lanes
        self._gave_up = gave_up
        self._deadline = Deadline(0.0)
        self._sent: deque[_Transfer] = deque()
        self._received: deque[_Transfer] = deque()
        self._connected: set[tuple[int, int]] = set()
        self._posted = itertools.count()

    def begin(self, deadline: Deadline, number: int) -> None:
        del number  # messages are told apart by their order alone
        self._deadline = deadline

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> _Transfer:
        self._tidy()
        dense = [as_dense(t) for t in tensors]
        works = [self._lanes[lane].send([as_bytes(t)], peer, 0) for t in dense]
        sent = _Transfer(peer, dense, works, next(self._posted))
        self._sent.append(sent)
        return sent

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming:
        self._tidy()
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        works = [self._lanes[lane].recv([as_bytes(t)], peer, 0) for t in tensors]
        number = next(self._posted)
        self._received.append(_Transfer(peer, [], works, number))
        return _Arriving(peer, tensors, works, number, self._tidy)

    def release(self, handle: _Transfer) -> None:
        """Let go of what was sent: the device waits until it has been read, the host does not."""
        for work in handle.works if handle.tensors else ():
            work.wait()
        handle.tensors.clear()

    def held(self) -> int:
        """The number of sent messages whose memory is still kept."""
        self._tidy()
        return sum(1 for transfer in self._sent if transfer.tensors)

    def _tidy(self) -> None:
        for transfers in (self._sent, self._received):
            while transfers and transfers[0].is_done:
                transfers.popleft().tensors.clear()

    def finish(self) -> None:
        """Wait on the host until every message of the step has arrived."""
        while True:
            self._tidy()
            if self._gave_up():
                raise TransportError(self.oldest() or 0, "the call was given up", timed_out=False)
            peer = self.oldest()
            if peer is None:
                return
            if self._deadline.left() == 0.0:
                text = f"timed out after {self._deadline.seconds:g} s"
                raise TransportError(peer, text, timed_out=True)
            time.sleep(_PAUSE)

    def oldest(self) -> int | None:
        """The other end of the oldest message that is not done; asked from any thread.

        Later ones may wait for it, in a queue or for what is computed from it.
        """
        waiting = [one for one in (*self._received, *self._sent) if not one.is_done]
        return min(waiting, key=lambda one: one.number).peer if waiting else None

    def abandon(self) -> None:
        self._sent.clear()
        self._received.clear()

    def close(self) -> None:
        for lane in self._lanes:
            with contextlib.suppress(Exception):
                lane.abort()

    def connect(self, pairs: Iterable[tuple[int, int]], rank: int, device: torch.device) -> None:
        """Exchange a byte on each lane between all pairs of ranks that have not done so yet.

        All ranks call this with the same pairs.
        """
        new = {(min(pair), max(pair)) for pair in pairs} - self._connected
        if new:
            with_others(
                lambda: self._connect(new, rank, device), device, self._deadline, self._gave_up
            )
        self._connected |= new

    def _connect(self, new: set[tuple[int, int]], rank: int, device: torch.device) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        for found in matchings(new):
            for low, high in found:
                if rank not in (low, high):
                    continue
                peer = high if rank == low else low
                for lane in range(len(self._lanes)):
                    shapes = [((1,), torch.uint8)]
                    if rank == low:
                        self.send(peer, [token], lane)
                    self.recv(peer, shapes, device, lane)
                    if rank == high:
                        self.send(peer, [token], lane)
                self.finish()
