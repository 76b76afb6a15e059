"""Look for the best way to train: guess all candidates, price the promising ones.

In:  the costs of a graph (or fixed stages), hardware, a memory limit.
Out: `Option`s, quickest first.

A candidate is guessed from the whole model's load and the schedule's outline. In the order of
the guesses the model is cut and the program simulated, until what is left is guessed clearly
slower or the budget of simulated actions is used up; every schedule that may fit gets
one try. If nothing fits, the candidates that are guessed to need least memory are tried.
Long steps are simulated in part: after a while every further microbatch adds the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fxpipe.errors import PlanError
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.stage_numbers import EdgeBytes, StageNumbers, numbers_of
from fxpipe.planner.cost.workload import Checkpointing, Training, Workload, workload_of
from fxpipe.planner.partition.partition import Partition, partition, shifted
from fxpipe.planner.partition.work import Limits, in_flight
from fxpipe.planner.search.auto_split import REORDER_GAIN, named_items
from fxpipe.planner.search.candidates import Candidate, outline
from fxpipe.planner.search.estimate import Memory, Prediction, predict, stage_costs
from fxpipe.planner.search.option import Option
from fxpipe.program import Placement, Program
from fxpipe.program.play.collector import collector_paused

__all__ = ["Pricing", "Search"]

_WHOLE = 4_000
"""Steps of up to so many actions are simulated from beginning to end."""


@dataclass(frozen=True)
class Pricing:
    """All that the price of a candidate depends on besides itself.

    `stage_of` fixes the stage of each node; None lets the planner cut. `pins` and
    `together` are as in `auto_split`, with a function that finds the items of a module.
    """

    costs: GraphCosts
    sizes: Mapping[str, int]
    hardware: Hardware
    training: Training
    memory_limit: float
    stage_of: Mapping[str, int] | None = None
    pins: Mapping[str, int] | None = None
    together: tuple[tuple[str, ...], ...] = ()
    reprice: Callable[[Workload, int, Checkpointing], Workload] | None = None


@dataclass(frozen=True, slots=True)
class _Guess:
    time: float
    memory: float


@dataclass(frozen=True, slots=True)
class _Whole:
    """The whole model: seconds of F, I and W, then bytes; `boundary` is a typical one."""

    times: tuple[float, float, float]
    state: float
    residual: float
    deferred: float
    boundary: float


class Search:
    """Prices candidates and remembers what they have in common."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._loads: dict[tuple[int, Checkpointing], Workload] = {}
        self._sums: dict[tuple[int, Checkpointing], _Whole] = {}
        self._floors: dict[tuple[int, Checkpointing, int], float] = {}
        self._cuts: dict[tuple[object, ...], list[Partition]] = {}

    def run(
        self,
        found: Sequence[Candidate],
        *,
        budget: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Option]:
        """Price candidates, those that fit first, each group from the best on."""
        # Simulations make a great number of small objects without a cycle.
        with collector_paused():
            return self._run(found, budget, progress)

    def _run(
        self,
        found: Sequence[Candidate],
        budget: int,
        progress: Callable[[int, int], None] | None,
    ) -> list[Option]:
        limit = self.pricing.memory_limit
        guesses = {candidate: self.guess(candidate) for candidate in found}
        order = sorted(found, key=lambda c: (guesses[c].memory > limit, guesses[c].time, c))
        tried: dict[Candidate, Option] = {}
        fitting: list[Option] = []
        used = 0
        seen: set[str] = set()
        for candidate in order:
            best = min((option.step_time for option in fitting), default=math.inf)
            is_new = candidate.schedule not in seen and guesses[candidate].memory <= limit
            if used > budget and fitting and not (is_new and used < 2 * budget):
                break
            if guesses[candidate].time > 1.2 * best and not is_new:
                continue
            if guesses[candidate].memory > 2 * limit or (used > budget and not is_new):
                break
            seen.add(candidate.schedule)
            used += self._actions(candidate)
            option = self._try(candidate, best)
            if option is not None:
                tried[candidate] = option
                if option.missing(limit) <= 0:
                    fitting.append(option)
            if progress is not None:
                progress(min(used, budget), budget)
        if not fitting:
            least = sorted(found, key=lambda c: (guesses[c].memory, c))
            for candidate in [c for c in least if c not in tried][:8]:
                option = self._try(candidate)
                if option is not None:
                    tried[candidate] = option
        return sorted(
            tried.values(), key=lambda o: (o.missing(limit), o.step_time, o.peak, o.candidate)
        )

    def load(self, candidate: Candidate) -> Workload:
        """The work of one microbatch."""
        key = (candidate.microbatch_size, candidate.checkpointing)
        if key not in self._loads:
            pricing = self.pricing
            made = workload_of(
                pricing.costs, self._sizes(candidate), pricing.hardware, self._training(candidate)
            )
            self._loads[key] = made if pricing.reprice is None else pricing.reprice(made, *key)
        return self._loads[key]

    def guess(self, candidate: Candidate) -> _Guess:
        """Time and memory if the model could be cut anywhere."""
        whole, c = self._whole(candidate), candidate
        ranks = c.pipeline
        times = tuple(time / ranks for time in whole.times)
        slowest = max(math.fsum(times), c.stages_per_rank * self._heaviest(c))
        idle, holds = 0.0, 1.0
        if ranks > 1:
            transfer = self.pricing.hardware.intra.time(whole.boundary)
            shape = outline(c.schedule, c.stages_per_rank, times, transfer)
            idle, holds = shape.idle(ranks), shape.holds(ranks, c.num_microbatches)
        kept = whole.residual
        if c.info.splits_backward:
            # What waits for the weight half is held for part of the time.
            kept = max(kept, whole.deferred / 2)
        time = slowest * (c.num_microbatches + idle)
        return _Guess(time, (whole.state + holds * kept) / ranks)

    def _heaviest(self, candidate: Candidate) -> float:
        """The slowest stage if only time counts and data travels for free."""
        c = candidate
        key = (c.microbatch_size, c.checkpointing, c.num_stages)
        if key not in self._floors:
            times = [item.time for item in self.load(c).work.items]
            self._floors[key] = _least_slowest(times, c.num_stages)
        return self._floors[key]

    def price(self, candidate: Candidate, below: float = math.inf) -> Option:
        """Cut the model for a candidate and simulate a step.

        Another cut for the sake of memory is tried only if the step is quicker than `below`.

        Raises:
            PlanError: the model has fewer parts than stages, or wishes contradict each other.
        """
        if self.pricing.stage_of is not None:
            given = self._as_given(candidate)
            return self._option(candidate, given, range(candidate.num_stages), 0.0)
        load, limit = self.load(candidate), self.pricing.memory_limit
        options = [
            (self._option(candidate, load, found.stage_of, found.bound), found)
            for found in self._even(candidate, load)
        ]
        best, cut = min(options, key=lambda pair: (pair[0].missing(limit), pair[0].step_time))
        if not 0 < best.missing(limit) < limit / 2 or best.step_time > below:
            return best
        taken = [memory.buffers for memory in best.prediction.memory]
        other = best
        for _ in range(4):
            tight = self._tight(candidate, load, cut, taken)
            if tight.stage_of != cut.stage_of:
                other = self._option(candidate, load, tight.stage_of, tight.bound)
            if other.missing(limit) < best.missing(limit):
                best = other
            if other.missing(limit) <= 0:
                break
            # What a partition does not count moved with the cut: leave room where it is short.
            lacks = [max(m.total - limit, 0.0) for m in other.prediction.memory]
            taken = [a + 1.2 * b for a, b in zip(taken, lacks, strict=True)]
            cut = tight
        return best

    def _try(self, candidate: Candidate, below: float = math.inf) -> Option | None:
        try:
            return self.price(candidate, below)
        except PlanError:
            return None

    def _actions(self, candidate: Candidate) -> int:
        whole = 2 * candidate.num_stages * candidate.num_microbatches
        return min(whole, _WHOLE + 9 * candidate.num_stages * candidate.pipeline)

    def _sizes(self, candidate: Candidate) -> dict[str, int]:
        return {**self.pricing.sizes, "batch": candidate.microbatch_size}

    def _training(self, candidate: Candidate) -> Training:
        return replace(self.pricing.training, checkpointing=candidate.checkpointing)

    def _whole(self, candidate: Candidate) -> _Whole:
        key = (candidate.microbatch_size, candidate.checkpointing)
        if key not in self._sums:
            load = self.load(candidate)
            work = load.work
            sizes = sorted(flow.num_bytes for flow in work.flows if flow.num_bytes)
            self._sums[key] = _Whole(
                (
                    math.fsum(item.forward for item in work.items),
                    math.fsum(item.backward_input for item in work.items),
                    math.fsum(item.backward_weight for item in work.items),
                ),
                math.fsum([*(i.state for i in work.items), *(s.state for s in work.shared)]),
                math.fsum([*(i.residual for i in work.items), *(s.residual for s in work.shared)]),
                math.fsum(node.deferred for node in load.loads.values()),
                sizes[len(sizes) // 2] if sizes else 0.0,
            )
        return self._sums[key]

    def _limits(self, load: Workload, placement: Placement, width: int) -> Limits:
        pricing = self.pricing
        links = stage_costs((), {}, placement, pricing.hardware, width=width).links
        pins = {
            item: stage
            for name, stage in (pricing.pins or {}).items()
            for item in named_items(pricing.costs, load, name)
        }
        together = tuple(
            tuple(sorted({i for name in group for i in named_items(pricing.costs, load, name)}))
            for group in pricing.together
        )
        return Limits(pins, together, link=pricing.hardware.intra, links=links)

    def _even(self, candidate: Candidate, load: Workload) -> list[Partition]:
        """Cuts by time: ranks as even as possible, and stages as even as possible."""
        c = candidate
        placement = c.info.placement(c.pipeline, c.num_stages)
        key = (c.microbatch_size, c.checkpointing, placement, c.data_parallel)
        if key not in self._cuts:
            limits = self._limits(load, placement, c.data_parallel)
            found = [self._cut(load, placement, limits)]
            if c.stages_per_rank > 1:
                # Even ranks may hide uneven stages, for which microbatches queue up.
                apart = Limits(limits.pins, limits.together, link=limits.link)
                other = self._cut(load, Placement.loop(c.num_stages, c.num_stages), apart)
                if other.stage_of != found[0].stage_of:
                    found.append(other)
            self._cuts[key] = found
        return self._cuts[key]

    def _cut(self, load: Workload, placement: Placement, limits: Limits) -> Partition:
        # One stage per rank is solved by dynamic programming; the rest would take minutes.
        effort = 0 if placement.num_ranks < placement.num_stages else 2_000
        return partition(load.work, placement, limits, effort=effort, reorder_gain=REORDER_GAIN)

    def _tight(
        self, candidate: Candidate, load: Workload, cut: Partition, taken: Sequence[float]
    ) -> Partition:
        """The cut shifted so that as little memory as possible is missing.

        A partition counts weights and residuals; `taken` is what each rank needs besides.
        """
        c = candidate
        program = c.info(c.pipeline, c.num_stages, min(c.num_microbatches, 4 * c.pipeline))
        limits = self._limits(load, program.placement, c.data_parallel)
        room = tuple(max(self.pricing.memory_limit - size, 0.0) for size in taken)
        limits = replace(limits, memory=room, in_flight=in_flight(program))
        return shifted(load.work, replace(cut, placement=program.placement), limits)

    def _as_given(self, candidate: Candidate) -> Workload:
        """One item per stage, when stages are given."""
        load, stage_of = self.load(candidate), self.pricing.stage_of
        assert stage_of is not None
        nodes: list[list[str]] = [[] for _ in range(candidate.num_stages)]
        for node in self.pricing.costs.nodes:
            nodes[stage_of[node.name]].append(node.name)
        return replace(load, nodes=tuple(map(tuple, nodes)))

    def _option(
        self, candidate: Candidate, load: Workload, cut: Sequence[int], bound: float
    ) -> Option:
        stages, edges = numbers_of(load, cut)
        nodes: list[list[str]] = [[] for _ in range(candidate.num_stages)]
        for item, names in enumerate(load.nodes):
            nodes[cut[item]] += names
        prediction = self._predict(candidate, stages, edges)
        return Option(
            candidate, prediction, stages, edges, tuple(map(tuple, nodes)),
            self._modules(nodes), bound,
        )  # fmt: skip

    def _modules(self, nodes: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """The names of what weighs something, for people."""
        named = {n.name: n.module for n in self.pricing.costs.nodes if n.module and n.parameters}
        return tuple(
            tuple(dict.fromkeys(named[name] for name in names if name in named)) for names in nodes
        )

    def _predict(
        self, candidate: Candidate, stages: Sequence[StageNumbers], edges: EdgeBytes
    ) -> Prediction:
        c = candidate

        def step(count: int) -> Prediction:
            program: Program = c.info(c.pipeline, c.num_stages, count)
            return predict(program, stages, edges, self.pricing.hardware, width=c.data_parallel)

        few = 2 * max(c.pipeline, 4)
        if 2 * c.num_stages * c.num_microbatches <= _WHOLE or c.num_microbatches <= few + 1:
            return step(c.num_microbatches)
        more = few + max(c.pipeline // 2, 4)
        if more >= c.num_microbatches:
            return step(c.num_microbatches)
        return _extended(step(few), few, step(more), more, c.num_microbatches)


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


def _extended(short: Prediction, few: int, long: Prediction, more: int, count: int) -> Prediction:
    """What two short steps say about a long one."""
    share = (count - more) / (more - few)

    def line(a: float, b: float) -> float:
        return b + share * (b - a)

    makespan = line(short.makespan, long.makespan)
    busy = line(short.makespan * (1 - short.bubble), long.makespan * (1 - long.bubble))
    memory = tuple(
        Memory(
            *(
                max(line(getattr(a, item.name), getattr(b, item.name)), 0.0)
                for item in fields(Memory)
            )
        )
        for a, b in zip(short.memory, long.memory, strict=True)
    )
    return Prediction(
        line(short.step_time, long.step_time),
        makespan,
        1 - busy / makespan if makespan else 0.0,
        memory,
    )
