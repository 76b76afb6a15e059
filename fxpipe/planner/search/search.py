"""Look for the best way to train: guess all candidates, price the promising ones.

In:  the costs of a graph (or fixed stages), hardware, a memory limit.
Out: `Option`s, quickest first.

A candidate is guessed from the whole model's load and the schedule's outline. In the order of
the guesses the model is cut and a whole step simulated, until what is left is guessed clearly
slower or the budget of simulated actions is used up; every schedule that may fit gets
one try. Long steps come after short ones, and only if they are guessed to beat them; those of more
than `_LARGEST` actions are looked at only if no other fits. A cut first
makes ranks even; if memory is short, within what it leaves. The best are then cut again by what
their step really takes (`refine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.errors import PlanError
from fxpipe.planner.cost.graph_costs import GraphCosts
from fxpipe.planner.cost.hardware import Hardware
from fxpipe.planner.cost.measured import Profile
from fxpipe.planner.cost.parallel import Layout
from fxpipe.planner.cost.stage_numbers import numbers_of
from fxpipe.planner.cost.training import Checkpointing, Training
from fxpipe.planner.cost.workload import Workload, is_model_input, workload_of
from fxpipe.planner.order.orders import Objective
from fxpipe.planner.partition.partition import Partition, partition
from fxpipe.planner.partition.work import InFlight, Limits, in_flight
from fxpipe.planner.search.auto_split import REORDER_GAIN, named_items
from fxpipe.planner.search.candidates import Candidate
from fxpipe.planner.search.estimate import predict, stage_costs
from fxpipe.planner.search.guess import Guess, Guesses, inside
from fxpipe.planner.search.option import Option
from fxpipe.planner.search.refine import best_cut
from fxpipe.program import Placement, Program
from fxpipe.program.play.engine import collector_paused

__all__ = ["Pricing", "Search"]

_LARGEST = 150_000
"""Steps of more actions than this, deep pipelines of very many microbatches, are a last resort."""

_MANY = 16
"""So many steps at least can be simulated within the budget; longer ones come later."""

_SLOWER = 8
"""How much longer it takes to simulate an action in a step with copies to the host."""

_SETTLED = 16
"""So many options are cut again; more only if their steps are short."""

_EFFORT = 2_000
"""Steps of the exact search for a partition."""


@dataclass(frozen=True)
class Pricing:
    """All that the price of a candidate depends on besides itself.

    `stage_of` fixes the stage of each node; None lets the planner cut. `pins` and
    `together` are as in `auto_split`, with a function that finds the items of a module.
    `offload` is the distance to offload at, 0 for never; `keeps` are the ways of checkpointing
    beside which that is tried.
    """

    costs: GraphCosts
    sizes: Mapping[str, int]
    hardware: Hardware
    training: Training
    memory_limit: float
    stage_of: Mapping[str, int] | None = None
    pins: Mapping[str, int] | None = None
    together: tuple[tuple[str, ...], ...] = ()
    profile: Profile | None = None
    sequence_parallel: bool = True
    objective: Objective = "step"
    offload: int = 0
    keeps: tuple[Checkpointing, ...] = ("none",)


class Search:
    """Prices candidates and remembers what they have in common."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._loads: dict[tuple[object, ...], Workload] = {}
        self._guesses = Guesses(pricing.hardware, self._load)
        self._cuts: dict[tuple[object, ...], tuple[list[tuple[int, ...]], float]] = {}
        self._programs: dict[tuple[object, ...], Program] = {}
        self._moments: dict[tuple[object, ...], InFlight] = {}
        self._used = 0  # simulated actions

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
            tell = progress or (lambda done, total: None)
            tried = self._explore(found, budget, tell)
            return self._settle(tried, budget, tell)

    def _explore(
        self,
        found: Sequence[Candidate],
        budget: int,
        tell: Callable[[int, int], None],
    ) -> dict[Candidate, Option]:
        limit = self.pricing.memory_limit
        guesses: dict[Candidate, Guess] = {}
        for number, candidate in enumerate(found):
            guesses[candidate] = self._guesses.of(candidate)
            if number % 100 == 0:
                tell(budget * number // len(found) // 5, budget)

        def place(candidate: Candidate) -> tuple[object, ...]:
            """By time and, where guesses are within 3 % of each other, short steps first."""
            guess = guesses[candidate]
            near = round(math.log(guess.time) / 0.03) if guess.time > 0 else -math.inf
            short, plain = _num_actions(candidate), candidate.extras
            return guess.memory > limit, near, short, guess.time, plain, candidate

        order = sorted((c for c in found if _num_actions(c) <= _LARGEST), key=place)
        tried: dict[Candidate, Option] = {}
        # Long steps are worth their time only if they are guessed to beat what is known by then.
        short = [c for c in order if _num_actions(c) <= budget // _MANY]
        long = [c for c in order if _num_actions(c) > budget // _MANY]
        # With few or small ones a guess need not decide: all are tried.
        rounds = (
            (short, 1.2, budget // 2), (long, 1.0, budget * 3 // 4), (short, math.inf, budget // 8)
        )  # fmt: skip
        for some, slack, until in rounds:
            self._sweep(some, guesses, tried, slack=slack, until=until)
            tell(budget // 5 + min(self._used, budget) // 2, budget)
        if not self._fitting(tried):
            least = sorted(found, key=lambda c: (guesses[c].memory, c))
            for candidate in [c for c in least if c not in tried][:12]:
                if self._used > budget and self._fitting(tried):
                    break
                option = self._try(candidate)
                if option is not None:
                    tried[candidate] = option
        self._offload(tried, budget)
        return tried

    def _offload(self, tried: dict[Candidate, Option], budget: int) -> None:
        """Try with host memory what is quicker than all that fits, and what need not repeat."""
        limit, best = self.pricing.memory_limit, min(self._fitting(tried), default=math.inf)
        if not self.pricing.offload or self.pricing.hardware.host is None:
            return
        quicker = [option for option in tried.values() if option.step_time < best]
        quicker.sort(key=lambda o: o.missing(limit) if best == math.inf else o.step_time)
        chosen = [option.candidate for option in quicker[:4]]
        for option in sorted(tried.values(), key=lambda o: (o.missing(limit), o.step_time))[:2]:
            if option.candidate.checkpointing != "none":
                keeps = [replace(option.candidate, checkpointing=how) for how in self.pricing.keeps]
                chosen += keeps
        for candidate in dict.fromkeys(chosen):
            if _SLOWER * _num_actions(candidate) <= budget // 4 and self._used <= budget:
                found = self._try(replace(candidate, offload=self.pricing.offload))
                if found is not None:
                    tried[found.candidate] = found

    def _sweep(
        self,
        order: Sequence[Candidate],
        guesses: Mapping[Candidate, Guess],
        tried: dict[Candidate, Option],
        *,
        slack: float,
        until: int,
    ) -> None:
        """Try candidates in order; after `until` actions only schedules that have had no try."""
        limit, seen = self.pricing.memory_limit, {c.schedule for c in tried}
        best = min(self._fitting(tried), default=math.inf)
        low: dict[str, float] = {}  # by schedule, the least that a guess of memory was short by
        for candidate in order:
            guess, name = guesses[candidate], candidate.schedule
            if candidate in tried:
                continue
            is_new = name not in seen and guess.memory <= limit
            if guess.memory > 2 * limit or self._used > 1.5 * until:
                break
            if not is_new and (
                guess.time > slack * best
                or self._used > until
                or (slack < math.inf and guess.memory * low.get(name, 0.0) > limit)
            ):
                continue
            seen.add(name)
            option = self._try(candidate, best)
            if option is None:
                continue
            tried[candidate] = option
            low[name] = min(low.get(name, math.inf), option.peak / (guess.memory or 1.0))
            if option.missing(limit) <= 0:
                best = min(best, option.step_time)

    def _fitting(self, tried: Mapping[Candidate, Option]) -> list[float]:
        """The times of the steps that fit."""
        limit = self.pricing.memory_limit
        return [option.step_time for option in tried.values() if option.missing(limit) <= 0]

    def _settle(
        self, tried: dict[Candidate, Option], budget: int, tell: Callable[[int, int], None]
    ) -> list[Option]:
        """Cut the best options again by their steps."""
        limit = self.pricing.memory_limit

        def place(option: Option) -> tuple[object, ...]:
            extras = option.candidate.extras
            return option.missing(limit), option.step_time, option.peak, extras, option.candidate

        def ranked() -> list[Option]:
            """From the best on, without what changes nothing: of equal options the plainest."""
            found: dict[object, Option] = {}
            for option in sorted(tried.values(), key=place):
                plain = replace(option.candidate, checkpointing="none", offload=0)
                found.setdefault((plain, option.step_time, option.peak), option)
            return list(found.values())

        order = ranked()
        fits = bool(order) and order[0].missing(limit) <= 0
        for number, option in enumerate(order):
            most = 4 * budget if number < 4 else budget if number < _SETTLED else budget // 8
            if self._used > most and (fits or number >= _SETTLED):
                break
            tell(budget * 7 // 10 + min(budget * number // _SETTLED, budget) // 5, budget)
            better = self.refine(option, budget=max(budget - self._used, budget // 4) // 4)
            tried[option.candidate] = better
            if not fits and better.missing(limit) <= 0:
                break
        tell(budget, budget)
        return ranked()

    def load(self, candidate: Candidate) -> Workload:
        """The work of one microbatch."""
        layout = candidate.layout
        if not layout.sharding:
            # Replicas that share nothing are all alike; that there are some costs buckets.
            layout = replace(layout, data=layout.data if layout.expert > 1 else min(layout.data, 2))
        return self._load(candidate, layout)

    def _load(self, candidate: Candidate, layout: Layout) -> Workload:
        layout = replace(layout, sequence=self.pricing.sequence_parallel)
        key = (candidate.microbatch_size, candidate.checkpointing, layout)
        if key not in self._loads:
            pricing = self.pricing
            sizes = {**pricing.sizes, "batch": candidate.microbatch_size}
            training = replace(pricing.training, checkpointing=candidate.checkpointing)
            measured = None
            if pricing.profile is not None:
                measured = partial(pricing.profile.times, batch=candidate.microbatch_size)
            self._loads[key] = workload_of(
                pricing.costs, sizes, pricing.hardware, training, layout, measured=measured
            )
        return self._loads[key]

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
        cuts, bound = self._even(candidate, load)
        options = [self._option(candidate, load, cut, bound) for cut in cuts]
        best = min(options, key=lambda option: (option.missing(limit), option.step_time))
        if not 0 < best.missing(limit) < limit / 2 or best.step_time > below:
            return best
        # What a partition does not count; with another cut that is another number.
        taken = [m.buffers + m.system + m.reserve for m in best.prediction.memory]
        for _ in range(4):
            try:
                other = self._option(candidate, load, self._tight(candidate, load, taken), bound)
            except PlanError:
                break
            best = min(best, other, key=lambda option: (option.missing(limit), option.step_time))
            if other.missing(limit) <= 0:
                break
            lacks = [max(m.total - limit, 0.0) for m in other.prediction.memory]
            taken = [a + 1.2 * b for a, b in zip(taken, lacks, strict=True)]
        return best

    def option(self, candidate: Candidate, cut: Sequence[int]) -> Option:
        """A candidate with a given stage for each item."""
        return self._option(candidate, self.load(candidate), cut, 0.0)

    def refine(self, option: Option, *, budget: int) -> Option:
        """The option with its cuts moved while its step gets shorter, memory first."""
        if self.pricing.stage_of is not None or option.candidate.num_stages == 1:
            return option
        candidate, load = option.candidate, self.load(option.candidate)
        stage_of = {name: stage for stage, names in enumerate(option.nodes) for name in names}
        start = [stage_of[names[0]] for names in load.nodes]
        if start != sorted(start):
            return option  # branches run in another order than the model's own
        known: dict[tuple[int, ...], Option] = {}

        def rate(cut: tuple[int, ...]) -> tuple[float, float]:
            known[cut] = self._option(candidate, load, cut, option.bound)
            return known[cut].missing(self.pricing.memory_limit), known[cut].step_time

        limits = self._limits(load, option.placement, candidate.layout)
        found = best_cut(
            start,
            [item.time for item in load.work.items],
            option.placement,
            limits,
            rate,
            microbatches=candidate.num_microbatches,
            tries=max(
                budget // _num_actions(candidate) // (_SLOWER if candidate.offload else 1), 2
            ),
        )
        return known.get(found, option)

    def _try(self, candidate: Candidate, below: float = math.inf) -> Option | None:
        try:
            return self.price(candidate, below)
        except PlanError:
            return None

    def _limits(self, load: Workload, placement: Placement, layout: Layout) -> Limits:
        pricing = self.pricing
        links = stage_costs((), {}, placement, pricing.hardware, layout).links
        pins = {
            item: stage
            for name, stage in (pricing.pins or {}).items()
            for item in named_items(pricing.costs, load, name)
        }
        together = tuple(
            tuple(sorted({i for name in group for i in named_items(pricing.costs, load, name)}))
            for group in pricing.together
        )
        together += tuple(pair for pair in _fed_by_nothing(load) if pair[1] < len(load.nodes))
        return Limits(pins, together, link=pricing.hardware.intra, links=links)

    def _even(self, candidate: Candidate, load: Workload) -> tuple[list[tuple[int, ...]], float]:
        """Cuts by time: ranks as even as possible, and stages as even as possible.

        Then a load that no cut can get the slowest rank below.
        """
        c = candidate
        placement = c.info.placement(c.pipeline, c.num_stages)
        leaves = c.layout.num_ranks >= self.pricing.hardware.ranks_per_node
        # Weights that are gathered and gradients that are scattered take time in a stage.
        layout = c.layout if c.layout.sharding >= 2 else inside(c.layout)
        key = (c.microbatch_size, c.checkpointing, placement, layout, leaves)
        if key not in self._cuts:
            limits = self._limits(load, placement, c.layout)
            found = self._cut(load, placement, limits)
            cuts = [found.stage_of]
            if c.stages_per_rank > 1:
                # Even ranks may hide uneven stages, for which microbatches queue up.
                apart = Limits(limits.pins, limits.together, link=limits.link)
                other = self._cut(load, Placement.loop(c.num_stages, c.num_stages), apart)
                cuts += [other.stage_of] if other.stage_of != found.stage_of else []
            self._cuts[key] = (cuts, found.bound)
        return self._cuts[key]

    def _cut(self, load: Workload, placement: Placement, limits: Limits) -> Partition:
        return partition(load.work, placement, limits, effort=_EFFORT, reorder_gain=REORDER_GAIN)

    def _tight(
        self, candidate: Candidate, load: Workload, taken: Sequence[float]
    ) -> tuple[int, ...]:
        """The most even cut within the memory that is left where so much is taken.

        Raises:
            PlanError: there is none.
        """
        c = candidate
        # More microbatches than this do not change what a rank holds, or change it with each.
        count = min(c.num_microbatches, 4 * c.pipeline)
        program = self._program(c, count)
        key = (c.schedule, c.pipeline, c.num_stages, count)
        if key not in self._moments:
            self._moments[key] = in_flight(program)
        limits = self._limits(load, program.placement, c.layout)
        room = tuple(max(self.pricing.memory_limit - size, 0.0) for size in taken)
        limits = replace(limits, memory=room, in_flight=self._moments[key])
        return self._cut(load, program.placement, limits).stage_of

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
        program = self._program(candidate, candidate.num_microbatches)
        self._used += sum(map(len, program.ranks)) * (_SLOWER if candidate.offload else 1)
        machine, objective = self.pricing.hardware, self.pricing.objective
        prediction = predict(
            program, stages, edges, machine, candidate.layout, objective, offload=candidate.offload
        )
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

    def _program(self, candidate: Candidate, count: int) -> Program:
        """The program of a candidate for so many microbatches; the last few are remembered."""
        key = (candidate.schedule, candidate.pipeline, candidate.num_stages, count)
        if key not in self._programs:
            if len(self._programs) > 8:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = candidate.info(candidate.pipeline, candidate.num_stages, count)
        return self._programs[key]


def _num_actions(candidate: Candidate) -> int:
    """How many actions a whole step has, about."""
    each = 3 if candidate.info.splits_backward else 2
    return each * candidate.num_stages * candidate.num_microbatches


def _fed_by_nothing(load: Workload) -> list[tuple[int, int]]:
    """Items that read neither an input of the model nor a tensor, each with the one before it.

    A stage of such items alone would know none of the sizes.
    """
    reads = {
        node.name
        for node in load.costs.nodes
        if any(is_model_input(load.costs, value) for value in node.inputs)
    }
    fed = {target for flow in load.work.flows if flow.num_bytes for target in flow.targets}
    fed |= {item for item, names in enumerate(load.nodes) if not reads.isdisjoint(names)}
    first = min(fed, default=0)
    return [
        (max(i - 1, 0), max(i, 1)) for i in range(len(load.nodes)) if i not in fed and i != first
    ]
