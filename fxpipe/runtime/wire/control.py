"""Let all ranks of a group agree, and learn at once what went wrong elsewhere.

Three means, all beside the data path and all on the CPU:

* exchanges: every rank says something and hears what the others say. Each carries the call it
  belongs to, its phase and its number, and these are compared: ranks that make different calls
  are told so, all of them, at once.
* a key in the store for failures. A thread looks at it a few times a second during a call, so a
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
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, InputError
from fxpipe.program.play.queues import Streams
from fxpipe.runtime.wire.communicators import backend_of, own_communicators, streams_of
from fxpipe.runtime.wire.failure import (
    Deadline,
    Failure,
    described,
    raise_problems,
    remote_error,
)
from fxpipe.runtime.wire.plain import dumps, loads
from fxpipe.runtime.wire.sockets import HostTransport, Listener
from fxpipe.runtime.wire.store import PATIENCE, Store, StoreSilentError
from fxpipe.runtime.wire.stream_transport import StreamTransport
from fxpipe.runtime.wire.transport import GroupTransport, Transport, TransportError
from fxpipe.runtime.wire.watch import GRACE, POLL, Life, Watch
from fxpipe.torch_inside import default_store

__all__ = ["CALLS", "Control", "GroupControl", "LocalControl", "agree", "control_of"]

CALLS = (
    *("nothing", "step", "eval", "clip_grad_norm_"),
    *("save_checkpoint", "load_checkpoint", "save_weights", "shared_loss", "generate", "scaler"),
)
"""What all ranks must call together. The place of a name is its number in messages."""

_LOG = logging.getLogger(__name__)
_WIDTH = 8  # numbers of an exchange
_HEADER = 4  # of them: call, schedule, phase, number of the exchange
_BLOCK = 4096  # bytes of what a rank says in a gathering, if that is enough
_FEW = 8  # ranks that exchange by telling each other; more exchange over their group
_DESCRIPTORS = 64  # that must be free for meeting; less for few ranks
_CPU = torch.device("cpu")
_HOLDER = "(the process that holds it, usually rank 0, may be stopped or gone)"


class Control(Protocol):
    """How the ranks of one pipeline agree."""

    rank: int
    size: int
    failure: Failure | None
    is_dry: bool
    """Whether the other ranks are made up."""
    raises_everywhere: bool
    """Whether what this rank raises is known to all: set by who lets all ranks raise together."""

    def begin(
        self, call: str, schedule: int, deadline: Deadline, status: Callable[[], str]
    ) -> None: ...

    def end(self) -> None: ...

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]: ...

    def gather(self, value: Any) -> list[Any]: ...

    def alike(self, own: BaseException | None = None) -> contextlib.AbstractContextManager[None]:
        """Around checks of what all ranks have said: they fail everywhere, or nowhere.

        `own` is an exception of this rank's own that the others have been told.
        """

    def report(self, failure: Failure) -> Failure: ...

    def settled(self) -> Failure | None:
        """All ranks know of the failure of this call and got over it; returns it."""

    def give_up(self, failure: Failure) -> None:
        """Stop talking to the other ranks, for good."""

    def streams(self, device: torch.device) -> Streams | None:
        """What shares a queue on the way of tensors on `device`; None if nothing does."""

    def lost(self, error: TransportError, where: Failure) -> Failure:
        """Find out who is gone or silent after a transfer failed, and tell everybody."""

    def diagnose(self) -> str: ...


class LocalControl:
    """All ranks are in this process: there is nobody to ask."""

    rank = 0
    size = 1
    is_dry = False

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.raises_everywhere = True

    def begin(
        self, call: str, schedule: int, deadline: Deadline, status: Callable[[], str]
    ) -> None:
        self.failure = None

    def alike(self, own: BaseException | None = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end(self) -> None: ...

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return (tuple(numbers),)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def report(self, failure: Failure) -> Failure:
        self.failure = self.failure or failure
        return self.failure

    def settled(self) -> Failure | None:
        known, self.failure = self.failure, None
        return known

    def give_up(self, failure: Failure) -> None:
        self.failure = failure

    def streams(self, device: torch.device) -> Streams | None:
        del device
        return None

    def lost(self, error: TransportError, where: Failure) -> Failure:
        raise AssertionError("a transfer within one process failed") from error

    def diagnose(self) -> str:
        return ""


def agree(control: Control, problem: BaseException | None) -> None:
    """All ranks come here; if any has a problem, all raise."""
    told = control.gather(None if problem is None else described(problem))
    with control.alike(problem):
        raise_problems(told, problem)


_CONTROLS: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupControl] = weakref.WeakKeyDictionary()
_MEETINGS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def control_of(group: dist.ProcessGroup, deadline: Deadline) -> GroupControl:
    """The control of a process group, made at the first call and again once it is broken.

    Raises:
        RemoteStageError: a rank does not come before the deadline.
    """
    found = _CONTROLS.get(group)
    if found is not None:
        with contextlib.suppress(RuntimeError):
            found.look()  # another rank may have given it up after this one's latest call
    if found is None or (found.failure is not None and found.failure.is_final):
        found = _CONTROLS[group] = GroupControl(group, deadline)
    return found


class GroupControl:
    """Agreement over a gloo group of our own and the store, for the ranks of `group`."""

    is_dry = False

    def __init__(self, group: dist.ProcessGroup, deadline: Deadline) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.failure: Failure | None = None
        self.raises_everywhere = False
        self.schedules = 0
        self._is_busy = False
        self._group = weakref.ref(group)
        self._store = Store(_connect_store)
        meeting = _MEETINGS[group] = _MEETINGS.get(group, 0) + 1
        self._prefix = f"fxpipe/{_name(group)}/{meeting}"
        self._poll = POLL * max(1.0, dist.get_world_size() / 256)
        self._failures = 0
        self._lock = threading.Lock()  # around the two: the watching thread learns of failures, too
        self._sequence = 0
        self._call = (0, 0)
        self._deadline = deadline
        self._transports: dict[str, StreamTransport] = {}
        self._check_descriptors()
        listener = _listener(group)
        try:
            self._hosts = self._hello(listener)
            self._make_group(listener)
        finally:
            if listener is not None:
                listener.close()
        self._life = Life(
            {r: found["pid"] for r, found in enumerate(self._hosts) if self._is_near(r)},
            [r for r in range(self.size) if r != self.rank and not self._is_near(r)],
        )
        self._watch = Watch(self)

    # Meeting

    def _check_descriptors(self) -> None:
        """Without descriptors nothing can connect; the store that is connected can say so."""
        held: list[int] = []
        try:
            wanted = min(4 * (1 + self.size), _DESCRIPTORS)
            held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(wanted))
        except OSError as error:
            self._store = Store(default_store)
            failure = Failure(self.rank, None, None, "", "OSError", str(error), "broken")
            raise remote_error(self.report(failure)) from error
        finally:
            for one in held:
                os.close(one)

    def _hello(self, listener: Listener | None) -> list[dict[str, Any]]:
        """Tell in the store that this rank is here, and wait for the others."""
        mine = {
            "host": _host(),
            "pid": os.getpid(),
            "folder": None if listener is None else listener.folder,
        }
        keys = [self._key(f"hello/{rank}") for rank in range(self.size)]
        missing, pause = list(range(self.size)), 0.001
        self._store.patience = self._deadline.left()
        try:
            self._look_and_raise()
            self._store.set(keys[self.rank], json.dumps(mine))
            while missing := [r for r in missing if not self._store.check([keys[r]])]:
                self._look_and_raise()
                left = self._store.patience = self._deadline.left()
                if left == 0.0:
                    self._store.patience = PATIENCE
                    text = f"has not come to its first call within {self._deadline.seconds:g} s"
                    first = Failure(missing[0], None, None, "", "TimeoutError", text, "hang")
                    raise remote_error(self.report(first))
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            return [json.loads(self._store.get(key)) for key in keys]
        except StoreSilentError as error:
            text = f"{error} {_HOLDER}"
            silent = Failure(self.rank, None, None, "", "TimeoutError", text, "hang")
            raise remote_error(silent) from error
        finally:
            self._store.patience = PATIENCE

    def _make_group(self, listener: Listener | None) -> None:
        problem: BaseException | None = None
        try:
            left = datetime.timedelta(seconds=max(self._deadline.left(), 0.01))
            prefix, rank, size = self._prefix, self.rank, self.size
            # By a thread of its own: the other one goes on looking for failures.
            self._gloo: Any = Store(_connect_store).ask(
                lambda store: dist.ProcessGroupGloo(
                    dist.distributed_c10d.PrefixStore(prefix, store), rank, size, timeout=left
                ),
                self._deadline.left(),
                self._look_and_raise,
            )
            near = {r: h["folder"] for r, h in enumerate(self._hosts) if self._is_near(r)}
            found: dict[int, socket.socket] = {}
            if listener is not None and None not in [h["folder"] for h in self._hosts]:
                found = listener.connect(self.rank, near, self._deadline, self._look_and_raise)
        except BaseException as error:
            problem = error
        if problem is not None:
            kind, text = described(problem)
            failure = Failure(self.rank, None, None, "", kind, f"cannot connect: {text}", "broken")
            raise remote_error(self.report(failure)) from problem
        self._data: Transport = GroupTransport(self._gloo)
        self._joins_all = len(found) == self.size - 1 > 0
        if found:
            self._data = HostTransport(self._data, found, self._gave_up)
        self._talk = self._data

    def _is_near(self, rank: int) -> bool:
        here = self._hosts[self.rank]["host"]
        return rank != self.rank and bool(self._hosts[rank]["host"] == here)

    def transport(self, device: torch.device) -> Transport:
        """How tensors on `device` travel; all ranks ask for the same in the same order."""
        group = self._group()
        assert group is not None
        streams = streams_of(group, device)
        if streams is None:
            return self._data
        backend = backend_of(group, device)
        if backend not in self._transports:
            lanes = own_communicators(group, device, self._deadline)
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
        """What shares a queue on the way of tensors on `device`; None if nothing does."""
        group = self._group()
        assert group is not None
        return streams_of(group, device)

    # Calls

    def begin(
        self, call: str, schedule: int, deadline: Deadline, status: Callable[[], str]
    ) -> None:
        if self.failure is not None and self.failure.is_final:
            more = "the connection to the other ranks is broken since then: make a new schedule"
            raise remote_error(self.failure, more)
        if self._is_busy:
            raise InputError(
                f"{call}() was called while a call of another schedule of the same process group "
                "is not over: from a hook, a loss function, or another thread"
            )
        self._is_busy, self.raises_everywhere = True, False
        self._call = (CALLS.index(call), schedule)
        self._deadline = deadline
        self.failure = None
        for transport in (self._data, *self._transports.values()):
            transport.begin(deadline, self._sequence)
        self._watch.start(status)

    def end(self) -> None:
        self._is_busy = False
        self._watch.stop()
        if self.failure is not None and self.failure.is_final:
            self.close()  # so that whoever waits for this rank learns of it

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Every rank's numbers, by rank.

        Raises:
            InputError: on all ranks, which make different calls.
        """
        rows = self._allgather(torch.tensor(self._row(1, numbers), device=_CPU))
        found = tuple(tuple(row.tolist()) for row in rows)
        self._check(found)
        return tuple(row[_HEADER:] for row in found)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; plain data only, see `plain`."""
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

    @contextlib.contextmanager
    def alike(self, own: BaseException | None = None) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if error is own or isinstance(error, FxpipeError):
                self.raises_everywhere = True
            raise

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
                + (f" of its schedule {row[1] or 'that is new'}" if several else "")
                for r, row in enumerate(rows)
            ]
            self.raises_everywhere = True
            raise InputError(f"all ranks must make the same call, but {', '.join(calls)}")
        text = f"the ranks are at different places of a call: {[row[:_HEADER] for row in rows]}"
        raise remote_error(
            self.report(Failure(self.rank, None, None, "", "FxpipeError", text, "broken"))
        )

    def _allgather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [mine]
        try:
            if self._joins_all and self.size <= _FEW:
                return self._tell_all(mine)
            return self._over_group(mine)
        except TransportError as error:
            here = Failure(self.rank, None, None, "", "", "")
            failure = self.lost(error, here)
            raise remote_error(
                failure, self.diagnose() if failure.kind == "hang" else ""
            ) from error
        except FxpipeError:
            raise
        except BaseException as error:  # an interrupt: half a message may be on its way
            self._break(error)
            raise

    def _tell_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        shapes = [(tuple(mine.shape), mine.dtype)]
        incoming = {rank: self._talk.recv(rank, shapes, _CPU) for rank in others}
        for rank in others:
            self._talk.send(rank, [mine])
        found = {rank: one.wait()[0] for rank, one in incoming.items()}
        self._talk.finish()
        return [found.get(rank, mine) for rank in range(self.size)]

    def _over_group(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._gloo.allgather([parts], [mine])
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

    def _break(self, error: BaseException) -> None:
        kind, text = described(error)
        self.report(Failure(self.rank, None, None, "", kind, text or "stopped", "broken"))

    # Failures

    def report(self, failure: Failure) -> Failure:
        """Publish a failure; the first one of a call wins and is returned."""
        text, number = json.dumps(asdict(failure)), self._failures
        key = self._key(f"failure/{number}")
        try:
            text = self._store.compare_set(key, "", text).decode()
        except StoreSilentError:  # whoever has stopped it hears of the failure when it goes on
            self._store.post(partial(_set_first, key, text))
        except Exception:
            text = json.dumps(asdict(failure))
        found = Failure(**json.loads(text))
        self._learn(found, number)
        if found.is_final:
            self._status()
        return found

    def _learn(self, failure: Failure, number: int) -> None:
        """Take note of a failure, unless it was settled while the store was asked."""
        with self._lock:
            if number == self._failures:
                self.failure = failure

    def settled(self) -> Failure | None:
        with contextlib.suppress(StoreSilentError):
            self.look()
        with self._lock:
            known, self.failure = self.failure, None
            self._failures += 1
        return known

    def give_up(self, failure: Failure) -> None:
        if self.failure is not None and self.failure.is_final:
            return  # `end` closes the connections
        if not self.report(failure).is_final:  # an earlier failure took the place: say it louder
            with self._lock:
                self._failures += 1
            self.report(failure)
        self.close()

    def look(self) -> None:
        """Look for a failure in the store; say what we are doing if it is final."""
        known = self.failure
        if known is not None and known.is_final:
            return
        number = self._failures
        # A rank that cannot get over the failure it has reported says so under the next key.
        for key in (self._key(f"failure/{number}"), self._key(f"failure/{number + 1}")):
            if self._store.check([key]):
                self._learn(Failure(**json.loads(self._store.get(key).decode())), number)
        if self.failure is not None and self.failure.is_final:
            self._status()

    def watch(self, is_active: bool) -> None:
        """What the thread does again and again."""
        self._life.sign(self._store, self._key(f"life/{self.rank}"))
        if not is_active:
            return
        self.look()
        if self.failure is None or not self.failure.is_final:
            gone = self._life.gone(self._store, self._key("life"))
            if gone is not None:
                rank, why = gone
                self.report(Failure(rank, None, None, "", "ConnectionError", why, "lost"))
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
            self.report(Failure(rank, None, None, "", "TimeoutError", text, "hang"))
            return

    def lost(self, error: TransportError, where: Failure) -> Failure:
        # Another rank may know why: one that gave up closes its connections, too.
        patience = Deadline(0.0 if error.timed_out else GRACE)
        while True:
            with contextlib.suppress(RuntimeError):
                self.look()
            if self.failure is not None and self.failure.is_final:
                return self.failure
            ended = self._life.ended()
            if ended or patience.left() == 0.0:
                break
            time.sleep(0.02)
        rank, why = ended[0] if ended else (error.peer, str(error))
        at = f" in action {where.action}" if where.action else ""
        if self._store.is_silent:
            why = f"{why}; the store of the process groups does not answer either {_HOLDER}"
        if error.timed_out and not ended:
            # Who is silent waits for nobody: ask all ranks where they are.
            waited = f"waited {self._deadline.seconds:g} s" if rank < 0 else why
            text = f"no answer from rank {rank}: " if rank >= 0 else ""
            rank = max(rank, 0)
            return self.report(
                Failure(
                    rank, where.stage, where.microbatch, where.action, "TimeoutError",
                    f"{text}{waited} (noticed by rank {self.rank}{at})", "hang",
                )
            )  # fmt: skip
        text = f"lost the connection to rank {rank}: {why} (noticed by rank {self.rank}{at})"
        return self.report(Failure(rank, None, None, "", "ConnectionError", text, "lost"))

    def close(self) -> None:
        """End all connections after a final failure."""
        for transport in (self._data, *self._transports.values()):
            transport.close()

    def _gave_up(self) -> bool:
        return self.failure is not None and self.failure.is_final

    def _look_and_raise(self) -> None:
        self.look()
        if self.failure is not None:
            raise remote_error(self.failure)

    def diagnose(self) -> str:
        """What every rank is doing, as far as they still answer."""
        patience = Deadline(GRACE)
        lines = []
        for rank in range(self.size):
            key, text = self._key(f"status/{rank}"), "no answer: not inside a call, or gone"
            if rank == self.rank:
                text = self._watch.status()
            else:
                with contextlib.suppress(Exception):
                    while not self._store.check([key]) and patience.left() > 0:
                        time.sleep(POLL / 4)
                    if self._store.check([key]):
                        text = self._store.get(key).decode()
            lines.append(f"  rank {rank}: {text}")
        return "\n".join(lines)

    def _status(self) -> None:
        with contextlib.suppress(Exception):
            self._store.set(self._key(f"status/{self.rank}"), self._watch.status())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @property
    def poll(self) -> float:
        return self._poll

    @property
    def needs_signs(self) -> bool:
        return self._life.needs_signs


def _connect_store() -> Any:
    return default_store().clone()


def _set_first(key: str, text: str, store: Any) -> None:
    store.compare_set(key, "", text)


def _name(group: dist.ProcessGroup) -> str:
    try:
        return str(group.group_name)
    except (RuntimeError, AttributeError):  # of a backend written in Python
        return "-".join(map(str, dist.get_process_group_ranks(group)))


def _host() -> str:
    """What processes that see each other have in common, and no others."""
    parts = [socket.gethostname(), str(os.getuid())]
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
        with open("/proc/sys/kernel/random/boot_id") as boot:
            parts.append(boot.read().strip())
    return " ".join(parts)


def _listener(group: dist.ProcessGroup) -> Listener | None:
    if group.size() == 1 or os.environ.get("FXPIPE_SOCKETS") == "0":
        return None
    try:
        return Listener()
    except OSError:
        return None


def side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, made once per group."""
    side = _SIDES.get(group)
    if side is None:
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            use_local_synchronization=True,
            sort_ranks=False,
        )
        assert made is not None
        side = _SIDES[group] = made
    return side


_SIDES: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
