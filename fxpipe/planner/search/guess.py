"""Guess what a candidate takes as if the model could be cut anywhere.

In:  hardware, and a function that prices one microbatch of a candidate in a layout.
Out: a `Guess` per candidate; nothing is cut and nothing simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpipe.planner.cost.collectives import collective_time
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.parallel import Layout
from fxpipe.planner.cost.stage_numbers import StageNumbers, numbers_of
from fxpipe.planner.cost.workload import Workload
from fxpipe.planner.search.candidates import Candidate, outline

__all__ = ["Guess", "Guesses", "inside"]


@dataclass(frozen=True, slots=True)
class Guess:
    """Seconds of a step, and bytes of a rank."""

    time: float
    memory: float


class Guesses:
    """Guesses candidates and remembers what they have in common."""

    def __init__(self, hardware: Hardware, load: Callable[[Candidate, Layout], Workload]) -> None:
        self._hardware, self._load = hardware, load
        self._sums: dict[int, StageNumbers] = {}
        self._floors: dict[tuple[object, ...], float] = {}

    def of(self, candidate: Candidate) -> Guess:
        """Time and memory if the model could be cut anywhere."""
        c, machine, layout = candidate, self._hardware, candidate.layout
        load = self._load(c, inside(layout))
        if id(load) not in self._sums:
            self._sums[id(load)] = numbers_of(load, [0] * len(load.nodes))[0][0]
        whole, ranks = self._sums[id(load)], c.pipeline
        times = [t / ranks for t in (whole.forward, whole.backward_input, whole.backward_weight)]
        slowest = max(math.fsum(times), c.stages_per_rank * self._heaviest(c))
        shards = layout.context * layout.data
        group = layout.group("replicas")
        reduce = collective_time("all_reduce", whole.reduced / ranks, group, machine)
        if layout.sharding == 3:
            slowest = max(slowest, 1.5 * reduce)
        idle, holds = 0.0, 1.0
        if ranks > 1:
            sizes = sorted(flow.num_bytes for flow in load.work.flows if flow.num_bytes)
            transfer = machine.intra.time(sizes[len(sizes) // 2] if sizes else 0.0)
            shape = outline(c.schedule, c.stages_per_rank, times, transfer)
            idle, holds = shape.idle(ranks), shape.holds(ranks, c.num_microbatches)
        kept = whole.kept
        if c.info.splits_backward:
            # What waits for the weight half is held for part of the time.
            kept = max(kept, whole.deferred / 2)
        # Few microbatches do not fill the ranks: each has to go there and back.
        latency = ranks * (times[0] + times[1]) + times[2]
        time = max(slowest * (c.num_microbatches + idle), latency)
        time += max(reduce - slowest, 0.1 * reduce)
        state = whole.weights / (shards if layout.sharding >= 3 else 1)
        state += whole.gradients / (shards if layout.sharding >= 2 else 1)
        state += whole.optimizer / (shards if layout.sharding >= 1 else 1)
        held = (state + holds * kept) * (1 + machine.reserve) + machine.holes * whole.remade
        held = held / ranks + machine.context
        return Guess(time, held)

    def _heaviest(self, candidate: Candidate) -> float:
        """The slowest stage if only time counts and data travels for free."""
        c = candidate
        key = (c.microbatch_size, c.checkpointing, inside(c.layout), c.num_stages)
        if key not in self._floors:
            times = [item.time for item in self._load(c, inside(c.layout)).work.items]
            self._floors[key] = _least_slowest(times, c.num_stages)
        return self._floors[key]


def inside(layout: Layout) -> Layout:
    """The layout without what differs only in how state is kept."""
    # As many replicas as the experts' group takes, if it is larger than theirs.
    inner = layout.tensor * layout.context
    return replace(layout, data=math.lcm(layout.expert, inner) // inner, sharding=0)


def _least_slowest(times: Sequence[float], parts: int) -> float:
    """The least possible greatest sum of consecutive times in so many parts."""
    low, high = max(times, default=0.0), math.fsum(times)
    low = max(low, high / parts)
    for _ in range(20):
        middle, needed, room = (low + high) / 2, 1, 0.0
        for time in times:
            room += time
            if room > middle * (1 + 1e-12):
                needed, room = needed + 1, time
        low, high = (low, middle) if needed <= parts else (middle, high)
    return high
