"""A process group on the CPU that orders, delays and fails its messages as NCCL does.

    register()
    group = dist.new_group(ranks, backend="nccl_rank")     # or nccl_pair, nccl_direction
    bind("nccl_eager")                                      # after init_process_group

What NCCL does and gloo does not:

- no buffers: a transfer happens when both halves are at the head of their queues. What shares a
  queue is the model of streams: all messages of a rank ("rank", an eager communicator), those
  with one peer ("pair", a lazy one), or those to or from one peer ("direction");
- posting returns at once, and the memory is read or written only when the two halves meet. A
  receive buffer is full of NaN until then, and a sent tensor that is changed too early arrives
  changed;
- messages are matched by their order alone; tags mean nothing;
- `work.wait()` is a dependency between streams: it does not raise and knows no time-out. There is
  no stream here that could wait, so the caller does. `work.wait(timeout)` blocks the host,
  is counted in `host_waits`, and aborts the communicator when the time is over;
- nobody learns that a peer has died or has aborted; `abort` lets our own waits return, silently;
- few dtypes can be sent;
- "nccl_eager" is "nccl_rank" in a job that init_process_group(device_id=...) has bound to a
  device: groups are connected when they are made, and `split_group` makes groups from their
  parent. All ranks of the parent split together, outside of Python and without a time limit.

Limit: DDP and device meshes want a group of C++; give them a gloo group.

Underneath, an own gloo group carries the bytes, after a token that says that the receive is at the
head of its queue. One thread works through each queue.
"""

import contextlib
import datetime
import itertools
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MODELS", "NcclLike", "NcclWork", "bind", "instances", "register"]

MODELS = ("rank", "pair", "direction", "eager")
DEVICE = torch.device("cuda", 0)
"""What an eager job is bound to: a name, since no tensor is ever there."""
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
_TOKEN, _DATA = 1, 2
_NEVER = datetime.timedelta(hours=1)
_CLOCK = itertools.count()  # of this process
_MADE: list["weakref.ref[NcclLike]"] = []


def register() -> None:
    """Make the models known to torch.distributed, once per process."""
    for model in MODELS:
        name = f"nccl_{model}"
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, _maker(model), devices=["cpu"])


def bind(backend: str | None) -> None:
    """Let a new job of an eager backend be bound to a device."""
    world: Any = dist.group.WORLD
    if backend == "nccl_eager":
        world.eager_connect_single_device(DEVICE)


def instances() -> list["NcclLike"]:
    """The groups that this process has made since it was last asked."""
    made = [group for group in (ref() for ref in _MADE) if group is not None]
    _MADE.clear()
    return made


def _maker(model: str) -> Callable[..., "NcclLike"]:
    def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> NcclLike:
        made = NcclLike(store, rank, size, timeout, model)
        _MADE.append(weakref.ref(made))
        return made

    return make


class NcclWork(dist.Work):
    """One posted operation."""

    def __init__(self, group: "NcclLike", what: str) -> None:
        super().__init__()
        self._group, self._what, self._done = group, what, threading.Event()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and not self._group.aborted.is_set()

    def exception(self) -> Any:
        return None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        group = self._group
        if timeout is None:
            while not self._done.wait(0.02) and not group.aborted.is_set():
                pass
            return True
        group.host_waits += 1
        if not self._done.wait(timeout.total_seconds()):
            group.abort()
            raise RuntimeError(
                f"[Rank {group.rank()}] Watchdog caught collective operation timeout: "
                f"WorkNCCL(OpType={self._what}) ran for {timeout.total_seconds() * 1000:.0f} "
                "milliseconds before timing out."
            )
        return True

    def synchronize(self) -> None:
        self.wait()

    def finish(self) -> None:
        self._done.set()


@dataclass(frozen=True, slots=True)
class _Options:
    _timeout: datetime.timedelta


_Queue = queue.SimpleQueue[Callable[[], None] | None]


class NcclLike(dist.ProcessGroup):
    """See the module."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta, streams: str
    ) -> None:
        super().__init__(rank, size)
        self.model = streams
        self.streams = "rank" if streams == "eager" else streams
        self.options = _Options(timeout)
        self.parent: NcclLike | None = None
        self.split: list[str] = []  # the names of groups that were split from this one
        self._store = store
        self.host_waits = 0
        self.sent_bytes: list[int] = []
        self.posted: list[tuple[int, bool, int]] = []  # when, is it a send, the peer
        self.aborted = threading.Event()
        self._inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout=_NEVER)
        # A rank that is connected could end, and close, before its peers know that they are too.
        store.set(f"connected {rank}", "")
        store.wait([f"connected {peer}" for peer in range(size)])
        self._queues: dict[Any, _Queue] = {}
        self._random = random.Random(int(os.environ.get("NCCL_LIKE_SEED", "0")) + rank)
        self._longest = float(os.environ.get("NCCL_LIKE_DELAY", "0.001"))

    # What torch asks of a group

    def _get_backend(self, device: torch.device) -> "NcclLike":
        if device.type != "cpu" and (self.model != "eager" or device != DEVICE):
            raise RuntimeError(f"no backend for {device}")
        return self

    def name(self) -> str:
        return f"nccl_{self.model}"

    def getBackendName(self) -> str:  # noqa: N802
        return self.name()

    # Splitting

    supports_splitting = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Of a rank that is not in a new group."""

    def _set_sequence_number_for_group(self) -> None:
        """Asked of each new group."""

    def split_group(
        self,
        ranks: list[int],
        timeout: datetime.timedelta | None = None,
        opts: _Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> "NcclLike | None":
        """A group of some ranks of this one, in their order; None on the others."""
        if self.bound_device_id is None:
            raise RuntimeError("Parent process group backend is not initialized")
        place, size, name = self.rank(), self.size(), str(group_name)
        prefix = f"split {len(self.split)}"
        self.split.append(name)
        store = self._store.clone()  # a wait takes all of a client
        store.set(f"{prefix} {place}", name)
        keys = [f"{prefix} {rank}" for rank in range(size)]
        store.wait(keys, _NEVER)
        names = {store.get(keys[rank]).decode() for rank in ranks}
        assert len(names) == 1, f"ranks call one group {names}"  # for gloo: NCCL would not mind
        if place not in ranks:
            return None
        found = dist.PrefixStore(f"{prefix} of {ranks}/", store)
        limit = timeout or self.options._timeout
        made = NcclLike(found, ranks.index(place), len(ranks), limit, self.model)
        made.parent, made.bound_device_id = self, self.bound_device_id
        _MADE.append(weakref.ref(made))
        return made

    def abort(self) -> None:
        self.aborted.set()
        for one in self._queues.values():
            one.put(None)
        self._wake_threads()

    def shutdown(self) -> None:
        self.abort()

    def _wake_threads(self) -> None:
        # A wait of gloo that times out closes every connection of its group.
        if self.size() > 1:
            with contextlib.suppress(RuntimeError):
                peer = (self.rank() + 1) % self.size()
                work = self._inner.recv([torch.empty(1, dtype=torch.uint8)], peer, 2**31 - 1)
                work.wait(datetime.timedelta(milliseconds=1))

    # Transfers

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> NcclWork:
        (tensor,) = tensors
        self._check(tensor)
        self.posted.append((next(_CLOCK), True, peer))
        self.sent_bytes.append(tensor.nbytes)

        def transfer() -> None:
            self._inner.recv([torch.empty(1, dtype=torch.uint8)], peer, _TOKEN).wait(_NEVER)
            self._delay()
            self._inner.send([_flat(tensor).clone()], peer, _DATA).wait(_NEVER)

        return self._post((peer, "to"), "SEND", transfer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> NcclWork:
        (tensor,) = tensors
        self._check(tensor)
        self.posted.append((next(_CLOCK), False, peer))
        _flat(tensor).fill_(255)

        def transfer() -> None:
            token = torch.zeros(1, dtype=torch.uint8)
            said = self._inner.send([token], peer, _TOKEN)
            arrived = torch.empty(tensor.nbytes, dtype=torch.uint8)
            self._inner.recv([arrived], peer, _DATA).wait(_NEVER)
            said.wait(_NEVER)
            self._delay()
            _flat(tensor).copy_(arrived)

        return self._post((peer, "from"), "RECV", transfer)

    def _check(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:
            raise RuntimeError(f"{type(tensor).__name__} does not have a sharding strategy")
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")

    def _delay(self) -> None:
        time.sleep(self._random.random() * self._longest)

    def _post(self, of_peer: tuple[int, str], what: str, transfer: Callable[[], None]) -> NcclWork:
        key = {"rank": None, "pair": of_peer[0], "direction": of_peer}[self.streams]
        work = NcclWork(self, what)

        def run() -> None:
            transfer()
            work.finish()

        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = queue.SimpleQueue()
            # The thread must not keep the group: a group that is dropped ends its threads.
            thread = threading.Thread(target=_serve, args=(found, self.aborted), daemon=True)
            weakref.finalize(self, found.put, None)
            thread.start()
        found.put(run)
        return work

    # Collectives: in the same queue where there is one per rank, else in one of their own

    def _collective(self, what: str, tensors: list[Any], start: Callable[[], Any]) -> NcclWork:
        del tensors

        def transfer() -> None:
            self._delay()
            start().wait(_NEVER)

        return self._post((-1, "all"), what, transfer)

    def allreduce(self, tensors: Any, opts: Any = None) -> NcclWork:
        return self._collective("ALLREDUCE", tensors, lambda: self._inner.allreduce(tensors, opts))

    def barrier(self, opts: Any = None) -> NcclWork:
        return self._collective("BARRIER", [], lambda: self._inner.barrier())


def _serve(todo: _Queue, aborted: threading.Event) -> None:
    """Do operations in posting order."""
    while (run := todo.get()) is not None and not aborted.is_set():
        try:
            run()
        except RuntimeError:  # the peer is gone: NCCL would wait for it for ever
            aborted.wait()
            return
        del run  # it holds the group


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
