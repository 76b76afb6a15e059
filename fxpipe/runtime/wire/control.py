"""Let all ranks of a pipeline agree, and learn of each other's faults at once.

Two means, both beside the data path and both on the CPU:

* a gloo group for small exchanges at the start and the end of a step. Every rank
  takes part in both whatever happened in between, so the group stays usable.
* a key in the store for faults. A thread looks at it a few times a second while
  a step runs, so a rank that is computing or waiting learns of a fault elsewhere
  without a message on the data path.

A rank that fails does not stop talking: it finishes the transfers it owes with
empty tensors (see `executor.drain`), so no peer is left waiting and the user's
process groups stay clean.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, RemoteStageError
from fxpipe.runtime.wire.transport import Transport, TransportError

__all__ = ["Control", "Fault", "GroupControl", "LocalControl", "remote_error", "side_group"]

POLL = 0.1
WIDTH = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong first, and where."""

    rank: int
    stage: int | None
    microbatch: int | None
    action: str
    type: str
    message: str
    kind: str = "error"

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.stage is not None:
            where += f", stage {self.stage}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}"
        if self.action:
            where += f", action {self.action}"
        return f"{where}: {self.type}: {self.message}"


def remote_error(fault: Fault) -> RemoteStageError:
    """The exception for the ranks that did not fail themselves."""
    return _raised_elsewhere(f"another rank failed: {fault}", fault)


def _raised_elsewhere(message: str, fault: Fault) -> RemoteStageError:
    return RemoteStageError(
        message,
        rank=fault.rank,
        stage=fault.stage,
        microbatch=fault.microbatch,
        action=fault.action,
    )


class Control(Protocol):
    """How the ranks of one pipeline agree."""

    rank: int
    size: int

    @property
    def fault(self) -> Fault | None: ...

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]: ...

    def gather(self, value: Any) -> list[Any]: ...

    def report(self, fault: Fault) -> Fault: ...

    def begin(self, status: Callable[[], str]) -> None: ...

    def end(self) -> None: ...

    def look(self) -> None: ...

    def diagnose(self) -> str: ...


class LocalControl:
    """All ranks are in this process: there is nobody to ask."""

    rank = 0
    size = 1
    fault: Fault | None = None

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return (tuple(numbers),)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def report(self, fault: Fault) -> Fault:
        return fault

    def begin(self, status: Callable[[], str]) -> None:
        del status

    def end(self) -> None: ...

    def look(self) -> None: ...

    def diagnose(self) -> str:
        return ""


_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
_COUNTS: dict[str, int] = {}


class GroupControl:
    """Agreement over a gloo group and the store, for the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._timeout = timeout
        self._group = side_group(group)
        self._direct: Transport | None = None
        self._step = 0
        self._fault: Fault | None = None
        self._watch = _Watch(self)
        # Kept, since gloo's threads may hold on to them a little longer than a call.
        self._mine = torch.zeros(WIDTH, dtype=torch.int64)
        self._parts = [torch.zeros(WIDTH, dtype=torch.int64) for _ in range(self.size)]
        self._store = dist.distributed_c10d._get_default_store()
        name = self._group.group_name
        _COUNTS[name] = _COUNTS.get(name, 0) + 1
        self._prefix = f"fxpipe/{name}/start"
        # Ranks may have made different numbers of schedules: take rank 0's number.
        first = self.exchange([_COUNTS[name]])[0][0]
        self._prefix = f"fxpipe/{name}/{first}"

    @property
    def fault(self) -> Fault | None:
        return self._fault

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Every rank's numbers, by rank."""
        row = [*numbers, *(0,) * (WIDTH - len(numbers))]
        self._mine.copy_(torch.tensor(row))
        if self._direct is None:
            self._allgather(self._mine, self._parts)
        else:
            self._exchange_directly(self._direct)
        return tuple(tuple(part.tolist()) for part in self._parts)

    def use(self, transport: Transport) -> None:
        """From now on exchange numbers over a transport that joins every two ranks."""
        self._direct = transport

    def _exchange_directly(self, transport: Transport) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        shapes = [((WIDTH,), torch.int64)]
        self._parts[self.rank].copy_(self._mine)
        try:
            incoming = [transport.recv(rank, shapes, self._mine.device) for rank in others]
            for rank in others:
                transport.send(rank, [self._mine])
            for rank, one in zip(others, incoming, strict=True):
                self._parts[rank] = one.wait()[0]
            transport.finish()
        except TransportError as error:
            self._look_or_lose()
            if self._fault is not None and self._fault.kind != "error":
                raise remote_error(self._fault) from error
            if error.timed_out:
                self._hung()
            self._lost(str(error))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Values must pickle."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [numbers[0] for numbers in self.exchange([data.numel()])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._allgather(padded, parts)
        return [
            pickle.loads(ctypes.string_at(part.data_ptr(), size))
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _allgather(self, mine: torch.Tensor, parts: list[torch.Tensor]) -> None:
        work = self._group.allgather([parts], [mine])
        deadline = time.monotonic() + self._timeout
        patience = datetime.timedelta(seconds=2 * POLL)
        while True:
            try:
                work.wait(patience)
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    self._lost(str(error))
                self._look_or_lose()
                if self._fault is not None and self._fault.kind != "error":
                    raise remote_error(self._fault) from error
                if time.monotonic() > deadline:
                    self._hung()

    def _look_or_lose(self) -> None:
        """Look for a fault: a rank that is not next to a lost one hears nothing of it here."""
        try:
            self.look()
        except RuntimeError as error:
            self._lost(f"the store does not answer: {error}")

    def _lost(self, text: str) -> None:
        fault = Fault(self.rank, None, None, "", "ConnectionError", f"lost a peer: {text}", "lost")
        raise remote_error(self.report(fault))

    def _hung(self) -> None:
        fault = Fault(
            self.rank, None, None, "", "TimeoutError",
            f"waited {self._timeout:g} s for all ranks to take part in a step", "hang",
        )  # fmt: skip
        known = self.report(fault)
        raise _raised_elsewhere(f"{known}\n{self.diagnose()}", known)

    def report(self, fault: Fault) -> Fault:
        """Publish a fault; the first one of a step wins and is returned."""
        text = json.dumps(asdict(fault))
        with contextlib.suppress(Exception):
            text = self._store.compare_set(self._key("fault"), "", text).decode()
        self._fault = Fault(**json.loads(text))
        return self._fault

    def begin(self, status: Callable[[], str]) -> None:
        self._step += 1
        self._fault = None
        self._watch.start(status)

    def end(self) -> None:
        self._watch.stop()

    def look(self) -> None:
        """Look for a fault in the store; answer if somebody asks what we are doing."""
        if self._fault is None and self._store.check([self._key("fault")]):
            self._fault = Fault(**json.loads(self._store.get(self._key("fault")).decode()))
            if self._fault.kind == "hang":
                self._store.set(self._key(f"status{self.rank}"), self._watch.status())

    def diagnose(self) -> str:
        """What every rank is doing, as far as they still answer."""
        deadline = time.monotonic() + 10 * POLL
        lines = []
        for rank in range(self.size):
            key, text = self._key(f"status{rank}"), "no answer: not inside a step, or gone"
            if rank == self.rank:
                text = self._watch.status()
            else:
                with contextlib.suppress(Exception):
                    while not self._store.check([key]) and time.monotonic() < deadline:
                        time.sleep(POLL / 4)
                    if self._store.check([key]):
                        text = self._store.get(key).decode()
            lines.append(f"  rank {rank}: {text}")
        return "\n".join(lines)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._step}/{name}"


class _Watch:
    """The thread that looks at the store while a step runs."""

    def __init__(self, control: GroupControl) -> None:
        self._control = weakref.ref(control)
        self._active = threading.Event()
        self._status: Callable[[], str] = lambda: ""
        self._thread: threading.Thread | None = None
        closed = weakref.finalize(control, self._active.set)
        # At exit the thread must sleep on: woken, it would use the store while that is torn down.
        closed.atexit = False

    def start(self, status: Callable[[], str]) -> None:
        self._status = status
        self._active.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_look_again_and_again,
                args=(self._control, self._active),
                name="fxpipe-watch",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        self._active.clear()
        self._status = lambda: "not inside a step"

    def status(self) -> str:
        return self._status()


def _look_again_and_again(control: weakref.ref[GroupControl], active: threading.Event) -> None:
    while True:
        active.wait()
        time.sleep(POLL)
        alive = control()
        if alive is None or sys.is_finalizing():
            return
        if active.is_set():
            with contextlib.suppress(Exception):  # the store is gone: nothing to learn any more
                alive.look()
        del alive


def side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, made once per group."""
    side = _GROUPS.get(group)
    if side is None:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        if made is None:
            raise FxpipeError(f"this process is not one of the pipeline's ranks {ranks}")
        side = _GROUPS[group] = made
    return side
