"""Which ways to train there are, and a first guess at each.

A `Candidate` is one choice of everything the planner decides. `candidates` lists all that
the numbers allow. `Outline` knows a schedule from two small simulations: its waiting grows in
proportion to the ranks, and so do the microbatches it holds, so both can be told for 1,024
ranks without simulating them. The guess decides what is looked at first, never the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fxpipe.errors import PlanError
from fxpipe.planner.cost.parallel import Layout
from fxpipe.planner.cost.training import CHECKPOINTINGS, Checkpointing
from fxpipe.planner.partition.work import in_flight
from fxpipe.planner.search.space import Space
from fxpipe.program import Edges, Link, Program, StageCosts
from fxpipe.program.generators import SCHEDULES, ScheduleInfo
from fxpipe.program.play.engine import Play, cost_times
from fxpipe.program.play.numbering import Numbering

__all__ = ["Candidate", "Outline", "candidates", "outline"]


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One way to train: how ranks, batch and memory are used."""

    data_parallel: int
    pipeline: int
    stages_per_rank: int
    microbatch_size: int
    num_microbatches: int
    schedule: str
    checkpointing: Checkpointing
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sharding: int = 0
    offload: int = 0  # the distance of `Schedule(offload=)`; 0: nothing leaves the device

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.layout.num_ranks

    @property
    def info(self) -> ScheduleInfo:
        return SCHEDULES[self.schedule]

    @property
    def layout(self) -> Layout:
        return Layout(
            self.tensor_parallel,
            self.context_parallel,
            self.expert_parallel,
            self.data_parallel,
            self.sharding,
        )

    @property
    def extras(self) -> tuple[bool, int]:
        """What it does beside computing, to put the plainest of equal options first."""
        return bool(self.offload), CHECKPOINTINGS.index(self.checkpointing)

    @property
    def is_buildable(self) -> bool:
        """Whether the runtime runs it as priced: a pipeline, with replicas or ZeRO 1."""
        inside = self.tensor_parallel * self.context_parallel * self.expert_parallel
        return inside == 1 and self.sharding <= 1

    def __str__(self) -> str:
        ranks = _count(self.pipeline, "rank", "ranks")
        sharing = [
            f"{name} {count}"
            for name, count in (
                ("tensor", self.tensor_parallel),
                ("context", self.context_parallel),
                ("expert", self.expert_parallel),
            )
            if count > 1
        ]
        inside = f" of {' x '.join(sharing)}" if sharing else ""
        replicas = f"{self.data_parallel} x " if self.data_parallel > 1 else ""
        stages = f", {self.stages_per_rank} stages each" if self.stages_per_rank > 1 else ""
        kept = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        zero = f", ZeRO {self.sharding}" if self.sharding else ""
        zero += f", offload {self.offload}" if self.offload else ""
        parts = _count(self.num_microbatches, "microbatch", "microbatches")
        return (
            f"{self.schedule} on {replicas}{ranks}{inside}{stages}, {parts} of "
            f"{self.microbatch_size}{kept}{zero}"
        )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def candidates(
    num_ranks: int,
    batch_size: int,
    num_items: int,
    space: Space,
    *,
    fixed_stages: int | None,
    num_blocks: int = 0,
) -> list[Candidate]:
    """All candidates that the numbers allow, in a fixed order.

    Raises:
        PlanError: there is none; the message says which number stands in the way.
    """
    found: list[Candidate] = []
    for inside in itertools.product(
        space.tensor_parallel, space.context_parallel, space.expert_parallel
    ):
        tensor, context, expert = inside
        if num_ranks % (tensor * context):
            continue
        for width in _divisors(num_ranks // (tensor * context)):
            if space.data_parallel is not None and width not in space.data_parallel:
                continue
            if batch_size % width or (width * context * tensor) % expert:
                continue
            ranks = num_ranks // (tensor * context * width)
            shards = space.sharding if width * context > 1 else space.sharding[:1]
            for shard in shards:
                rest = (*inside, shard if width * context > 1 else 0)
                found += _of_pipeline(
                    ranks, width, batch_size, num_items, space, fixed_stages, num_blocks, rest
                )
    if not found:
        raise PlanError(_nothing(num_ranks, batch_size, num_items, space, fixed_stages))
    return found


def _of_pipeline(
    ranks: int,
    width: int,
    batch_size: int,
    num_items: int,
    space: Space,
    fixed_stages: int | None,
    num_blocks: int,
    rest: tuple[int, ...],
) -> Iterator[Candidate]:
    names = space.schedules or tuple(name for name in SCHEDULES if name != "ForwardOnly")
    # On one rank there is nothing to wait for: all schedules accumulate gradients alike.
    plain = "1F1B" if "1F1B" in names else names[0]
    for size in _sizes(batch_size // width, space.microbatch_sizes):
        for per_rank in space.stages_per_rank or _per_rank(ranks, num_blocks):
            stages = ranks * per_rank
            if stages > num_items or (fixed_stages is not None and stages != fixed_stages):
                continue
            if ranks == 1 and per_rank > 1:
                continue
            for name in names:
                if not SCHEDULES[name].allows(per_rank) or (ranks == 1 and name != plain):
                    continue
                # With one stage per rank looped schedules are others by name only.
                is_looped = SCHEDULES[name].stages_per_rank[1] != 1
                if space.schedules is None and per_rank == 1 and is_looped:
                    continue
                count = batch_size // width // size
                for mode in space.checkpointing:
                    yield Candidate(width, ranks, per_rank, size, count, name, mode, *rest)


def _per_rank(ranks: int, num_blocks: int) -> list[int]:
    """Stages per rank to try: 1, 2, 4, and what divides equal blocks evenly.

    Embedding and head may count as blocks of their own.
    """
    even = {
        n
        for n in range(3, 9)
        if any(count and count % (n * ranks) == 0 for count in (num_blocks, num_blocks + 2))
    }
    return sorted({1, 2, 4, *even})


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _sizes(rows: int, allowed: Sequence[int] | None) -> list[int]:
    """Microbatch sizes for so many rows on one pipeline: powers of two, or what is asked for.

    Where few powers of two divide the rows, other divisors join, each at most twice the one
    before if there is such a one.
    """
    if allowed is not None:
        return [size for size in allowed if rows % size == 0]
    every = _divisors(rows)
    powers = [size for size in every if size & (size - 1) == 0]
    if len(powers) >= 4:
        return powers
    found = [1]
    while found[-1] < rows:
        more = [size for size in every if size > found[-1]]
        found.append(max((size for size in more if size <= 2 * found[-1]), default=more[0]))
    return found


def _nothing(
    num_ranks: int, batch_size: int, num_items: int, space: Space, fixed: int | None
) -> str:
    lines = [
        f"nothing fits {num_ranks} ranks, a batch of {batch_size} and "
        + (f"{fixed} stages" if fixed is not None else f"a model of {num_items} parts")
    ]
    inner = [
        t * c
        for t, c in itertools.product(space.tensor_parallel, space.context_parallel)
        if num_ranks % (t * c) == 0
    ]
    widths = [
        w
        for w in sorted({w for size in inner for w in _divisors(num_ranks // size)})
        if space.data_parallel is None or w in space.data_parallel
    ]
    if not inner:
        lines.append(f"tensor times context ranks must divide the {num_ranks} ranks")
    elif not widths:
        lines.append(f"data_parallel must divide the {num_ranks} ranks")
    elif fixed is not None:
        lines.append(f"a pipe of {fixed} stages needs as many ranks, or half or a quarter of them")
    elif all(num_ranks // w * min(space.stages_per_rank or (1,)) > num_items for w in widths):
        lines.append("there are more ranks than parts to spread; allow more data parallelism")
    elif all(batch_size % w for w in widths):
        lines.append(f"the batch must be a multiple of the replicas ({widths})")
    elif space.microbatch_sizes is not None:
        lines.append(f"microbatch sizes {list(space.microbatch_sizes)} must divide the batch")
    if space.schedules is not None:
        lines.append(f"schedules {list(space.schedules)} need certain numbers of stages per rank")
    return "; ".join(lines)


@dataclass(frozen=True, slots=True)
class Outline:
    """A schedule in two straight lines, for any number of ranks.

    `waits` is the idle time per further rank, in units of the time of one rank's work on a
    microbatch; `holds(ranks, microbatches)` the microbatches of a rank's layers it keeps.
    """

    waits: float
    holds_base: float
    holds_per_rank: float
    grows_with_batch: bool

    def idle(self, ranks: int) -> float:
        return self.waits * (ranks - 1)

    def holds(self, ranks: int, microbatches: int) -> float:
        if self.grows_with_batch:
            return microbatches
        return min(microbatches, max(self.holds_base + self.holds_per_rank * ranks, 1.0))


def outline(name: str, per_rank: int, times: Sequence[float], transfer: float) -> Outline:
    """The outline of a schedule for given F, I and W times of a rank and a transfer time."""
    total = math.fsum(times) or 1.0
    # Coarse, since each new combination costs two simulations.
    shares = tuple(round(10 * time / total) / 10 for time in times)
    return _outline(name, per_rank, shares, min(round(10 * transfer / total) / 10, 0.5))


@lru_cache(maxsize=4096)
def _outline(name: str, per_rank: int, shares: tuple[float, ...], transfer: float) -> Outline:
    idle, held, grows = [], [], False
    forward, backward_input, backward_weight = shares
    for ranks in (4, 6):
        program, numbering, most = _small_program(name, per_rank, ranks)
        costs = StageCosts.uniform(
            program.placement,
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            activation=transfer,
            link=Link(0.0, 1.0),
        )
        play = Play(program.ranks, numbering, cost_times(costs, program.num_stages))
        play.run()
        idle.append(max(end for end, *_ in play.done) - 3 * ranks * math.fsum(shares))
        held.append(most)
        grows = most >= 3 * ranks - 1e-9
    slope = (held[1] - held[0]) / 2
    return Outline(max((idle[1] - idle[0]) / 2, 0.0), held[0] - 4 * slope, slope, grows)


@lru_cache(maxsize=256)
def _small_program(name: str, per_rank: int, ranks: int) -> tuple[Program, Numbering, float]:
    """A program to know a schedule by, and the most microbatches that a rank of it holds."""
    program = SCHEDULES[name](ranks, ranks * per_rank, 3 * ranks)
    most = max(max(map(sum, moments)) for moments in in_flight(program)) / per_rank
    return program, Numbering.of(program, Edges.chain(program.num_stages)), most
