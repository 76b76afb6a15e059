"""Agreement of the ranks of a process group.

Three means, all beside the data path and all on the CPU:

* exchanges: every rank says something and hears what the others say. Each carries the call it
  belongs to, its phase and its number, and these are compared: ranks that make different calls
  are told so, all of them, at once.
* a board in the store for failures. A thread looks at it a few times a second during a call, so a
  rank that computes or waits learns of a failure elsewhere without a message on the data path.
* signs of life. A process on this host is watched through the kernel, which knows when it ends,
  whoever holds its sockets open. Processes on other hosts leave a sign in the store.

A rank that fails does not stop talking: it finishes the transfers it owes with empty tensors (see
`executor.drain`), so that no peer is left waiting and the next call can follow. What cannot be
finished breaks the group of ranks for good: every later call raises the same failure.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, InputError, RemoteStageError
from fxpipe.program.play.queues import Streams
from fxpipe.runtime.control.board import HOLDER, Board, idle
from fxpipe.runtime.control.control import CALLS, Control
from fxpipe.runtime.control.meeting import meet, name_of, own_store
from fxpipe.runtime.control.watch import GRACE, POLL, Life, Watch
from fxpipe.runtime.wire.communicators import (
    backend_of,
    is_splitting,
    own_communicators,
    streams_of,
    with_others,
)
from fxpipe.runtime.wire.failure import Deadline, Failure, described, remote_error
from fxpipe.runtime.wire.plain import dumps, loads
from fxpipe.runtime.wire.sockets import HostTransport
from fxpipe.runtime.wire.stream_transport import StreamTransport
from fxpipe.runtime.wire.transport import GroupTransport, Transport, TransportError
from fxpipe.torch_inside import gather_options

__all__ = ["GroupControl", "control_of"]

_LOG = logging.getLogger(__name__)
_WIDTH = 9  # numbers of an exchange
_HEADER = 4  # of them: call, schedule, phase, number of the exchange
_BLOCK = 4096  # bytes of what a rank says in a gathering, if that is enough
_FEW = 8  # ranks that exchange by telling each other; more exchange over their group
_CPU = torch.device("cpu")

_CONTROLS: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupControl] = weakref.WeakKeyDictionary()
_MEETINGS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def control_of(group: dist.ProcessGroup, deadline: Deadline) -> GroupControl:
    """The control of a process group, made at the first call and again once it is broken.

    Raises:
        RemoteStageError: a rank does not come before the deadline, or can never come again.
    """
    found = _CONTROLS.get(group)
    if found is not None:
        with contextlib.suppress(RuntimeError):
            found.board.look()  # another rank may have given it up after this one's latest call
        ended = found.life.ended() if found.board.is_over else []
        if ended:  # nobody takes its place in a process group: to wait for it would be in vain
            rank, why = ended[0]
            more = "the process group cannot be used again: start the job anew"
            raise remote_error(Failure(rank, "ConnectionError", why, "lost"), more)
    if found is None or found.board.is_over:
        found = _CONTROLS[group] = GroupControl(group, deadline)
    return found


class GroupControl(Control):
    """Agreement over a gloo group of our own and the store, for the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, deadline: Deadline) -> None:
        self.rank, self.size = group.rank(), group.size()
        meeting = _MEETINGS[group] = _MEETINGS.get(group, 0) + 1
        prefix = f"fxpipe/{name_of(group)}/{meeting}"
        self.board = Board(own_store(), prefix, self.rank, self.size)
        self.schedules = 0
        self.poll = POLL * max(1.0, dist.get_world_size() / 256)
        self._busy = threading.Lock()
        self._group = weakref.ref(group)
        self._sequence = 0
        self._call = (0, 0)
        self._deadline = deadline
        self._transports: dict[str, StreamTransport] = {}
        met = meet(self.board, deadline, is_splitting(group))
        self._gloo = met.gloo
        self._data: Transport = GroupTransport(met.gloo)
        self._joins_all = len(met.sockets) == self.size - 1 > 0
        if met.sockets:
            self._data = HostTransport(self._data, met.sockets, self._gave_up)
        others = set(range(self.size)) - {self.rank}
        self.life = Life(met.pids, sorted(others - set(met.pids)))
        self._watch = Watch(self)

    @property
    def failure(self) -> Failure | None:
        return self.board.failure

    @failure.setter
    def failure(self, failure: Failure | None) -> None:
        self.board.failure = failure

    def _gave_up(self) -> bool:
        return self.board.is_over

    # Ways for tensors

    def transport(self, device: torch.device) -> Transport:
        """How tensors on `device` travel; all ranks ask for the same in the same order."""
        streams = self.streams(device)
        if streams is None:
            return self._data
        group = self._group()
        assert group is not None
        backend = backend_of(group, device)
        if backend not in self._transports:
            name = self.board.key(backend)
            lanes = with_others(
                lambda: own_communicators(group, device, name),
                device,
                self._deadline,
                self._gave_up,
            )
            made = StreamTransport(lanes, streams, self._gave_up)
            made.begin(self._deadline, self._sequence)
            self._transports[backend] = made
            _LOG.info(
                "%s tensors travel over %d communicators of our own (%s, one queue per %s)",
                device.type,
                len(lanes),
                backend,
                streams,
            )
        return self._transports[backend]

    def streams(self, device: torch.device) -> Streams | None:
        group = self._group()
        assert group is not None
        return streams_of(group, device)

    def close(self) -> None:
        """End all connections after a final failure."""
        self._watch.end()
        for transport in (self._data, *self._transports.values()):
            transport.close()

    # Calls

    def begin(
        self, call: str, schedule: int, deadline: Deadline, status: Callable[[], str]
    ) -> None:
        if self.board.failure is not None and self.board.is_over:
            more = "the connection to the other ranks is broken since then: make a new schedule"
            if self.board.failure.kind == "lost":
                more = "a process of this group is gone: start the job again from a checkpoint"
            raise remote_error(self.board.failure, more)
        if not self._busy.acquire(blocking=False):
            raise InputError(
                f"{call}() was called while a call of another schedule of the same process group "
                "is not over: from a hook, a loss function, or another thread"
            )
        self.raises_everywhere = False
        self._call = (CALLS.index(call), schedule)
        self._deadline = deadline
        self.failure = None
        for transport in (self._data, *self._transports.values()):
            transport.begin(deadline, self._sequence)
        self.board.status = status
        self._watch.start()

    def end(self) -> None:
        self._busy.release()
        self._watch.stop()
        self.board.status = idle
        if self.board.is_over:
            self.close()  # so that whoever waits for this rank learns of it

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        rows = self._allgather(torch.tensor(self._row(1, numbers), device=_CPU))
        found = tuple(tuple(row.tolist()) for row in rows)
        self._check(found)
        return tuple(row[_HEADER:] for row in found)

    def gather(self, value: Any) -> list[Any]:
        problem: BaseException | None = None
        try:
            data = dumps(value)
        except Exception as error:
            problem, data = error, b""
        head = torch.tensor(self._row(2, [len(data), problem is not None]), device=_CPU)
        room = _BLOCK - head.nbytes
        text = torch.frombuffer(bytearray(data.ljust(room, b" ")), dtype=torch.uint8)
        parts = self._allgather(torch.cat([head.view(torch.uint8), text[:room]]))
        rows = [tuple(part[: head.nbytes].view(torch.int64).tolist()) for part in parts]
        self._check(rows)
        if any(row[_HEADER + 1] for row in rows):
            self.raises_everywhere = True
            if problem is not None:
                raise problem
            rank = next(r for r, row in enumerate(rows) if row[_HEADER + 1])
            raise InputError(f"rank {rank} has something to say that is not plain data")
        sizes = [row[_HEADER] for row in rows]
        texts = [bytes(part[head.nbytes :].tolist()) for part in parts]
        if max(sizes) > room:
            rest = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)[room:]
            more = self._allgather(rest)
            texts = [a + bytes(b.tolist()) for a, b in zip(texts, more, strict=True)]
        return [loads(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def _row(self, phase: int, numbers: Sequence[int]) -> list[int]:
        self._sequence += 1
        row = [*self._call, phase, self._sequence, *map(int, numbers)]
        return [*row, *(0,) * (_WIDTH - len(row))]

    def _check(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Compare what the ranks take this exchange for."""
        if len({row[:_HEADER] for row in rows}) == 1:
            return
        if len({row[2:_HEADER] for row in rows}) == 1:
            several = len({row[1] for row in rows}) > 1
            calls = [
                f"rank {r} calls {CALLS[row[0]]}()"
                + (f" of its {_ordinal(row[1])}" if several else "")
                for r, row in enumerate(rows)
            ]
            self.raises_everywhere = True
            more = "; make the same schedules in the same order on all ranks" if several else ""
            raise InputError(f"all ranks must make the same call, but {', '.join(calls)}{more}")
        text = f"the ranks are at different places of a call: {[row[:_HEADER] for row in rows]}"
        raise remote_error(self.report(Failure(self.rank, "FxpipeError", text, "broken")))

    def _allgather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [mine]
        try:
            if self._joins_all and self.size <= _FEW:
                return self._tell_all(mine)
            return self._over_group(mine)
        except TransportError as error:
            raise self.lost(error) from error
        except FxpipeError:
            raise
        except BaseException as error:  # an interrupt: half a message may be on its way
            kind, text = described(error)
            text = text or "stopped"
            self.report(Failure(self.rank, kind, text, "broken"))
            raise

    def _tell_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        shapes = [(tuple(mine.shape), mine.dtype)]
        incoming = {rank: self._data.recv(rank, shapes, _CPU) for rank in others}
        for rank in others:
            self._data.send(rank, [mine])
        found = {rank: one.wait()[0] for rank, one in incoming.items()}
        self._data.finish()
        return [found.get(rank, mine) for rank in range(self.size)]

    def _over_group(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._gloo.allgather([parts], [mine], gather_options(self._deadline.timeout))
        while True:
            try:
                work.wait(datetime.timedelta(seconds=min(0.2, max(self._deadline.left(), 0.01))))
                return parts
            except RuntimeError as error:
                peer = (self.rank + 1) % self.size
                if "Operation timed out" not in str(error):
                    raise TransportError(peer, str(error), timed_out=False) from error
                if self._gave_up():
                    raise TransportError(peer, "the call was given up", timed_out=False) from error
                if self._deadline.left() == 0.0:
                    text = f"timed out after {self._deadline.seconds:g} s"
                    raise TransportError(-1, text, timed_out=True) from error

    # Failures

    def report(self, failure: Failure) -> Failure:
        return self.board.report(failure)

    def settled(self) -> Failure | None:
        return self.board.settled()

    def give_up(self, failure: Failure) -> None:
        if not self.board.is_over:  # or `end` closes the connections
            self.board.report_final(failure)
            self.close()

    def watch(self, is_active: bool) -> None:
        """What the thread does again and again."""
        board = self.board
        self.life.sign(board.store, board.key(f"life/{self.rank}"))
        if not is_active:
            return
        board.look()
        if not board.is_over:
            gone = self.life.gone(board.store, board.key("life"))
            if gone is not None:
                rank, why = gone
                self.report(Failure(rank, "ConnectionError", why, "lost"))
            elif self._deadline.left() == 0.0:
                self._look_at_transfers()

    def _look_at_transfers(self) -> None:
        """The host may wait for a device that waits for a peer: nobody else looks at the clock."""
        silent = [transport.oldest() for transport in self._transports.values()]
        for rank in (rank for rank in silent if rank is not None):
            text = (
                f"no answer from rank {rank}: timed out after {self._deadline.seconds:g} s "
                f"(noticed by rank {self.rank})"
            )
            self.report(Failure(rank, "TimeoutError", text, "hang"))
            return

    def lost(self, error: TransportError, where: Failure | None = None) -> RemoteStageError:
        failure = self._find_lost(error, where or Failure(self.rank))
        return self.final(failure)

    def final(self, failure: Failure) -> RemoteStageError:
        return remote_error(failure, self.board.diagnose() if failure.kind == "hang" else "")

    def _find_lost(self, error: TransportError, where: Failure) -> Failure:
        # Another rank may know why: one that gave up closes its connections, too.
        patience = Deadline(0.0 if error.timed_out else GRACE)
        while True:
            with contextlib.suppress(RuntimeError):
                self.board.look()
            if self.board.failure is not None and self.board.is_over:
                return self.board.failure
            ended = self.life.ended()
            if ended or patience.left() == 0.0:
                break
            time.sleep(0.02)
        rank, why = ended[0] if ended else (error.peer, str(error))
        noticed = f"(noticed by rank {self.rank}"
        noticed += f" in action {where.action})" if where.action else ")"
        if self.board.store.is_silent:
            why = f"{why}; the store of the process groups does not answer either {HOLDER}"
        if error.timed_out and not ended:
            # Who is silent waits for nobody: ask all ranks where they are.
            text = f"no answer from rank {rank}: {why} {noticed}"
            if rank < 0:
                text = f"waited {self._deadline.seconds:g} s {noticed}"
            return self.report(Failure(max(rank, 0), "TimeoutError", text, "hang"))
        text = f"lost the connection to rank {rank}: {why} {noticed}"
        return self.report(Failure(rank, "ConnectionError", text, "lost"))


def _ordinal(schedule: int) -> str:
    """A schedule by its number, or by its place among those that have not run yet."""
    return f"schedule {schedule}" if schedule > 0 else f"new schedule {-schedule}"
