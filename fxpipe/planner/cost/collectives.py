"""How long a collective takes, on groups laid out over nodes.

In:  what is done (`Collective`), bytes, a `Group`, hardware.
Out: seconds.

A ring moves each byte once per rank for a gather or a scatter, twice for a reduction that all
keep. A group whose ranks sit k to a node leaves each node through k network cards, so between
nodes its ring is as quick as k of them together, and within a node as quick as the inner link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fxpipe.planner.cost.hardware import Hardware

__all__ = ["Collective", "Group", "collective_time"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that work together: so many, `stride` apart."""

    size: int
    stride: int = 1

    def per_node(self, hardware: Hardware) -> int:
        """How many of the group share a node."""
        return max(min(self.size, hardware.ranks_per_node // self.stride), 1)


def collective_time(
    kind: Collective,
    num_bytes: float,
    group: Group,
    hardware: Hardware,
    copies: float = 1.0,
    within: tuple[int, int] | None = None,
) -> float:
    """Seconds of one collective of `num_bytes`: the whole tensor, or a rank's own for all_to_all.

    Of what all_to_all moves, so many `copies` are of the same rows and go to ranks by chance,
    `within` so many of so many parts of the group.

    >>> from fxpipe.planner.cost.presets import HARDWARE
    >>> collective_time("all_reduce", 0, Group(1), HARDWARE["H100"])
    0.0
    """
    if group.size == 1 or not num_bytes:
        return 0.0
    near = group.per_node(hardware)
    nodes = math.ceil(group.size / near)
    inner = hardware.intra.bytes_per_time * hardware.intra_share
    outer = hardware.inter.bytes_per_time * hardware.inter_share
    latency = hardware.intra.latency * min(near - 1, 8)
    latency += hardware.inter.latency * 2 * math.log2(nodes)
    moved = num_bytes * (group.size - 1) / group.size
    if kind == "all_to_all":
        # Rows go to a node once, however many of its ranks they are for, and are copied there;
        # both go side by side.
        inside = num_bytes * (near - 1) / near / inner
        some, parts = within or (1, 1)
        allowed = min(nodes, max(some, nodes * some / parts))
        reached: float = allowed * (1 - (1 - 1 / allowed) ** copies)
        outside = num_bytes * reached / copies * (nodes - 1) / nodes / outer
        return latency + max(inside, outside)
    if kind == "all_reduce":
        moved, latency = 2 * moved, 2 * latency
    rate = inner if nodes == 1 else min(inner, near * outer) if near > 1 else outer
    return latency + moved / rate
