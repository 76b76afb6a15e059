"""Communicators of our own for accelerators: two per pipeline, and how they order messages.

fxpipe never talks on the user's group. Activations and gradients each have a communicator, made
from the group of the pipeline and kept as long as its control, so that neither waits for the other
or for the user's collectives.

A communicator does its operations in the order in which they were posted, and each occupies
its queue until the peer has come. What shares a queue is its *model of streams* (see
`program.validate`): programs are lowered for that model, or refused.

The queues between two ranks are set up when they first use them, by both together. `matchings`
puts the pairs into rounds in which no rank has two, so that no two ranks wait for each other
crosswise, and a chain of any length connects in two rounds.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar, get_args

import torch
import torch.distributed as dist

from fxpipe.program.play.queues import Streams
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import TransportError
from fxpipe.torch_inside import backend_object, named_group, split_group

__all__ = [
    "NCCL_STREAMS",
    "backend_of",
    "is_splitting",
    "matchings",
    "own_communicators",
    "streams_of",
    "with_others",
]

NUM_LANES = 2
_TIMEOUT = datetime.timedelta(
    days=20
)  # longer than calls: ours speaks first. Fits in 31 bits of ms
_SPLITTING: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
# Since torch 2.14 the lazy one has a name of its own.
_NCCL_IS_LAZY = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
NCCL_STREAMS = (
    "one queue per pair of ranks, or per rank if init_process_group got a device_id"
    if _NCCL_IS_LAZY
    else "one queue per rank; per pair of ranks with nccl-lazy in a job of another backend"
)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries tensors of a device, or gloo."""
    try:
        return str(backend_object(group, device).name()).lower()
    except RuntimeError:
        return "gloo"


def streams_of(group: dist.ProcessGroup, device: torch.device) -> Streams | None:
    """What shares a queue on communicators made from `group`; None where messages have no queue.

    NCCL's communicators have one queue per rank if they are connected eagerly, as are all that
    are split from others, and one per pair of ranks if they connect when two ranks first talk.
    A backend may say it in an attribute `streams`; of any other the hardest is assumed.
    """
    name = backend_of(group, device)
    if name == "gloo":
        return None
    known = getattr(backend_object(group, device), "streams", None)
    if known in get_args(Streams):
        return known
    is_lazy = name == "nccl-lazy" or (name == "nccl" and _NCCL_IS_LAZY)
    return "pair" if is_lazy and not _is_split(group, device) else "rank"


def own_communicators(
    group: dist.ProcessGroup, device: torch.device, name: str
) -> list[dist.ProcessGroup]:
    """One for activations and one for gradients. All ranks of `group` call this together.

    All of them know `name`, and nobody has used it.
    """
    if not _is_split(group, device):
        ranks, backend = dist.get_process_group_ranks(group), backend_of(group, device)
        made = [named_group(f"{name}/{i}", ranks, backend, _TIMEOUT) for i in range(NUM_LANES)]
    else:
        _SPLITTING.add(group)
        try:
            made = [split_group(group, device, f"{name}/{i}", _TIMEOUT) for i in range(NUM_LANES)]
        finally:
            _SPLITTING.discard(group)
    assert all(one.rank() == group.rank() for one in made)
    return made


def is_splitting(group: dist.ProcessGroup) -> bool:
    """Whether a thread splits `group`: between calls, one that was left alone (see `with_others`).

    Splits have no names that are compared: a later one of others would be taken for what it waits
    for.
    """
    return group in _SPLITTING


def matchings(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in rounds, such that no rank has two pairs in one round.

    A chain or ring of even length takes two rounds; in general fewer than twice the largest
    number of peers of a rank. The same on all ranks.
    """
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for pair in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
        for found, ranks in zip(rounds, busy, strict=True):
            if ranks.isdisjoint(pair):
                found.append(pair)
                ranks.update(pair)
                break
        else:
            rounds.append([pair])
            busy.append(set(pair))
    return rounds


def _is_split(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether communicators of our own are split from the group's, by its ranks alone.

    Where the job is bound to a device, torch would split those that it makes from the whole job's.
    """
    world = dist.group.WORLD
    is_bound = world is not None and world.bound_device_id is not None
    return is_bound and bool(getattr(backend_object(group, device), "supports_splitting", False))


_SLICE = 0.05  # seconds between two looks

T = TypeVar("T")


def with_others(
    work: Callable[[], T], device: torch.device, deadline: Deadline, gave_up: Callable[[], bool]
) -> T:
    """What `work` returns, done by a thread of its own, which is left alone once it is too late.

    Raises:
        TransportError: the deadline is over, or the call was given up meanwhile.
    """
    made: list[T] = []
    errors: list[BaseException] = []
    is_over = threading.Event()
    place = None if device.type == "cpu" else torch.accelerator.current_device_index()

    def run() -> None:
        try:
            if place is not None:  # every thread has a current device of its own
                torch.accelerator.set_device_index(place)
            made.append(work())
        except BaseException as error:
            errors.append(error)
        is_over.set()

    threading.Thread(target=run, name="fxpipe-connect", daemon=True).start()
    while not is_over.wait(_SLICE):
        if gave_up():
            raise TransportError(-1, "the call was given up", timed_out=False)
        if deadline.left() == 0.0:
            raise TransportError(-1, f"timed out after {deadline.seconds:g} s", timed_out=True)
    if errors:
        raise errors[0]
    return made[0]
