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
from collections.abc import Iterable
from typing import Any, get_args

import torch
import torch.distributed as dist

from fxpipe.program.play.queues import Streams
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.torch_inside import backend_object, named_group, split_group

__all__ = ["NCCL_STREAMS", "backend_of", "matchings", "own_communicators", "streams_of"]

NUM_LANES = 2
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
    group: dist.ProcessGroup, device: torch.device, name: str, deadline: Deadline
) -> list[dist.ProcessGroup]:
    """One for activations and one for gradients. All ranks of `group` call this together.

    All of them know `name`, and nobody has used it. The time-out of the communicators is longer
    than that of a call, so that ours speaks first.
    """
    timeout = datetime.timedelta(seconds=2 * max(deadline.seconds, 1800.0))
    made = []
    for lane in range(NUM_LANES):
        if _is_split(group, device):
            one: Any = split_group(group, device, f"{name}/{lane}", timeout)
        else:
            ranks = dist.get_process_group_ranks(group)
            one = named_group(f"{name}/{lane}", ranks, backend_of(group, device), timeout)
        assert one.rank() == group.rank()
        made.append(one)
    return made


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
