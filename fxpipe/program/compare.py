"""Put all schedules side by side for the same ranks, microbatches and costs.

In:  sizes, costs, a limit on memory.
Out: a `Comparison`, one row per schedule and number of stages per rank, the quickest
     that fits first; `str()` of it is a table.

Each program is lowered and simulated as it would run, so the figures include what its
messages cost. A schedule is left out where it is not defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Edges
from fxpipe.program.costs import StageCosts
from fxpipe.program.generators import SCHEDULES, get_schedule
from fxpipe.program.lower import lower
from fxpipe.program.play.queues import Streams
from fxpipe.program.program import Placement, Program
from fxpipe.program.simulate import simulate
from fxpipe.program.timeline import Timeline
from fxpipe.text import aligned

__all__ = ["Compared", "Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One schedule in a comparison.

    `peak_memory` is that of the fullest rank; `num_messages` counts transfers per step.
    """

    schedule: str
    stages_per_rank: int
    makespan: float
    idle: float
    idle_in_span: float
    peak_memory: float
    num_messages: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Schedules by makespan; those that do not fit the memory come last."""

    num_ranks: int
    num_microbatches: int
    memory_limit: float
    rows: tuple[Compared, ...]

    @property
    def best(self) -> Compared:
        """The quickest schedule that fits.

        Raises:
            ScheduleError: none fits; the one that needs least is named.
        """
        if self.rows[0].fits:
            return self.rows[0]
        least = min(self.rows, key=lambda row: row.peak_memory)
        raise ScheduleError(
            f"no schedule on {self.num_ranks} ranks with {self.num_microbatches} microbatches "
            f"fits into {self.memory_limit:g}; {least.schedule} with {least.stages_per_rank} "
            f"stages per rank needs least, {least.peak_memory:g}"
        )

    def __str__(self) -> str:
        head = ("schedule", "stages", "makespan", "idle", "once started", "memory", "messages", "")
        body = [
            (
                row.schedule,
                str(row.stages_per_rank),
                f"{row.makespan:.4g}",
                f"{row.idle:.1%}",
                f"{row.idle_in_span:.1%}",
                f"{row.peak_memory:.4g}",
                str(row.num_messages),
                "" if row.fits else f"over {self.memory_limit:.4g}",
            )
            for row in self.rows
        ]
        return "\n".join(aligned((head, *body)))


def compare(
    num_ranks: int,
    num_microbatches: int,
    *,
    schedules: Sequence[str] | None = None,
    stages_per_rank: Iterable[int] = (1, 2, 3, 4),
    costs: Callable[[Placement], StageCosts] = StageCosts.uniform,
    edges: Callable[[int], Edges] = Edges.chain,
    memory_limit: float = math.inf,
    streams: Streams = "pair",
) -> Comparison:
    """Simulate every schedule at every number of stages per rank for which it is defined.

        >>> print(compare(4, 8, memory_limit=4))
        schedule       stages  makespan   idle  once started  memory  messages
        ZBVZeroBubble       2      25.5   5.9%          0.0%       4        96
        ...

    Args:
        schedules: names as `get_schedule` knows them; by default all that train.
        stages_per_rank: which numbers of stages to try.
        costs: makes costs for a placement. The default splits one rank's share of the
            model, 1 for each of F, I, W and for memory, evenly over its stages.
        edges: makes edges for a number of stages.
        memory_limit: in the unit of the costs; what needs more is listed last.
        streams: the model of communication; see `validate`.

    Raises:
        ScheduleError: a name is unknown, or no schedule is defined for these numbers.
    """
    rows: list[Compared] = []
    refused: list[str] = []
    trained = [info for info in SCHEDULES.values() if info.trains]
    infos = trained if schedules is None else map(get_schedule, schedules)
    for info in infos:
        for per_rank in stages_per_rank:
            try:
                program = info(num_ranks, num_ranks * per_rank, num_microbatches)
            except ScheduleError as error:
                refused.append(f"{info.name} with {per_rank} stages per rank: {error}")
                continue
            model, graph = costs(program.placement), edges(program.num_stages)
            lowered = lower(program, graph, costs=model)
            timeline = simulate(lowered, model, graph, streams=streams)
            rows.append(_row(info.name, per_rank, lowered, timeline, memory_limit))
    if not rows:
        raise ScheduleError("no schedule is defined for this:\n  " + "\n  ".join(refused))
    rows.sort(key=lambda row: (not row.fits, row.makespan, row.peak_memory, row.num_messages))
    return Comparison(num_ranks, num_microbatches, memory_limit, tuple(rows))


def _row(
    name: str, per_rank: int, lowered: Program, timeline: Timeline, memory_limit: float
) -> Compared:
    peak = max(timeline.peak_memory)
    return Compared(
        schedule=name,
        stages_per_rank=per_rank,
        makespan=timeline.makespan,
        idle=timeline.idle,
        idle_in_span=timeline.idle_in_span,
        peak_memory=peak,
        num_messages=sum(a.kind.is_send for actions in lowered.ranks for a in actions),
        # Sums of shares such as 1/3 end a hair above what they stand for.
        fits=peak <= memory_limit * (1 + 1e-9),
    )
