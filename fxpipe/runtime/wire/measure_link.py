"""Measure how long tensors take from one process to another.

    link = measure_link(group)       # on every process of a group

The result is a `Link`, latency and bandwidth, through the medians of several sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import InputError
from fxpipe.program import Link

__all__ = ["measure_link"]

_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)


def measure_link(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    sizes: Sequence[int] = _SIZES,
    repeats: int = 9,
) -> Link:
    """The link between the first two processes of a group; call it on all of them.

    Raises:
        InputError: the group has one process only.
    """
    if dist.get_world_size(group) < 2:
        raise InputError("a link needs two processes, the group has one")
    me = dist.get_rank(group)
    times = []
    for size in sizes:
        runs = [_round_trip(me, group, size, torch.device(device)) for _ in range(repeats + 2)][2:]
        times.append(statistics.median(runs) / 2)
    found = [_fit(sizes, times)]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


def _round_trip(me: int, group: dist.ProcessGroup | None, size: int, device: torch.device) -> float:
    """Seconds until a tensor came back; only the first two processes take part."""
    if me > 1:
        return 0.0
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    start = time.perf_counter()
    if me == 0:
        dist.send(tensor, group=group, group_dst=1)
        dist.recv(tensor, group=group, group_src=1)
    else:
        dist.recv(tensor, group=group, group_src=0)
        dist.send(tensor, group=group, group_dst=0)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _fit(sizes: Sequence[int], times: Sequence[float]) -> Link:
    """Latency from the smallest size, bandwidth from what the largest takes beyond it."""
    latency = max(times[0], 1e-9)
    beyond = max(times[-1] - latency, 1e-9)
    return Link(latency, (sizes[-1] - sizes[0]) / beyond)
