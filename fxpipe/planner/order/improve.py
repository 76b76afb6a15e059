"""Make a schedule better for the costs at hand, by local search.

In:  a compute-only program, costs (stages may differ), a memory limit.
Out: `Improved`: a valid program that is never slower than the one given, what it takes, and
     a time that no order can be below.

Starts are the given program and every named schedule with the same placement that fits
into the memory. From each, weight gradients are placed anew in the holes that these costs
leave (`Orders.fill`); a list scheduler alone would lose to the hand-made patterns, so their
order of forwards and input gradients is kept as the start. Then a search changes that order,
mostly on the critical path, and fills again. It accepts a worse order now and then (less and
less often), and keeps the best. The random numbers come from `seed`, and the budget counts
timed actions, not seconds: same input, same result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import PlanError, ScheduleError
from fxpipe.planner.order.orders import Objective, Orders, Ranks, Timing, check_objective
from fxpipe.planner.order.schedule_bound import lower_bound
from fxpipe.program import Action, Edges, Kind, Program, StageCosts, Timeline, simulate, validate
from fxpipe.program.generators import SCHEDULES

__all__ = ["Improved", "improve", "limits_of", "named_starts"]

_PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)


@dataclass(frozen=True)
class Improved:
    """What `improve` found.

    `before` and `length` are simulated times of the program given and of `program`: of a step
    by itself or, if that was the objective, from step to step. `bound` is below the length of
    every order of the same actions within the memory.
    """

    program: Program
    timeline: Timeline
    before: float
    bound: float
    start: str
    objective: Objective = "step"

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def length(self) -> float:
        return _length(self.timeline, self.objective)

    def __str__(self) -> str:
        gain = 1 - self.length / self.before if self.before else 0.0
        above = self.length / self.bound - 1 if self.bound else 0.0
        return (
            f"{self.program.name}: {self.length:.6g} instead of {self.before:.6g} "
            f"({gain:.2%} quicker), at most {above:.2%} above the best possible "
            f"({self.bound:.6g}); {self.timeline.idle:.2%} idle, started from {self.start}"
        )


def improve(
    program: Program,
    costs: StageCosts,
    memory_limit: float | Sequence[float] | None = None,
    *,
    edges: Edges | None = None,
    seed: int = 0,
    budget: int = 2_000_000,
    starts: Sequence[Program] | None = None,
    objective: Objective = "step",
) -> Improved:
    """Look for an order of a program's actions that ends earlier.

    With the objective "period" one that lets steps follow each other sooner, each rank
    beginning the next step when its own is done (`Timeline.period`).

    `memory_limit` is what a rank may hold in the units of the costs (one number, or one per
    rank); without it the program's own peak of each rank. `starts` replaces the named
    schedules as further places to start from. `budget` is the number of actions to time.

    Raises:
        PlanError: the program itself does not fit into the memory, and no start does.
        ScheduleError: the program is not valid, or lowered.
    """
    check_objective(objective)
    edges = edges or Edges.chain(program.num_stages)
    if program.is_lowered:
        raise ScheduleError("improve takes compute-only programs: improve first, then lower")
    validate(program, edges)
    given = simulate(program, costs, edges)
    limits = given.peak_memory if memory_limit is None else limits_of(program, memory_limit)
    others = named_starts(program) if starts is None else list(starts)
    judge = _Judge(costs, edges, limits, objective)
    judge.consider(program, given, program.name or "the program given")
    ranked = _best_starts(program, others, judge)
    for orders, timing, _ in ranked:
        judge.consider_orders(orders, timing)
    for orders, timing, patience in ranked[:2]:
        share = budget // min(2, len(ranked))
        goal = judge.bound(orders.program)
        found = _anneal(orders, timing, patience, random.Random(seed), share, goal)
        judge.consider_orders(orders, found)
    if judge.best is None:
        raise PlanError(_shortage(program, given, limits))
    best, timeline, start = judge.best
    validate(best, edges)
    bound = min(judge.bound(best), _length(timeline, objective))
    return Improved(best, timeline, _length(given, objective), bound, start, objective)


def limits_of(program: Program, limit: float | Sequence[float]) -> tuple[float, ...]:
    """The memory limit of each rank.

    Raises:
        PlanError: the limit has another number of entries than there are ranks.
    """
    if isinstance(limit, int | float):
        return (float(limit),) * program.num_ranks
    if len(limit) != program.num_ranks:
        raise PlanError(
            f"the memory limit has {len(limit)} entries, but the program has "
            f"{program.num_ranks} ranks; give one number, or one per rank"
        )
    return tuple(map(float, limit))


def _length(timeline: Timeline, objective: Objective) -> float:
    return timeline.period if objective == "period" else timeline.makespan


def named_starts(program: Program) -> list[Program]:
    """All named schedules that place the stages as the program does."""
    ranks, stages = program.num_ranks, program.num_stages
    found = []
    for info in SCHEDULES.values():
        if not info.trains or stages % ranks or not info.allows(stages // ranks):
            continue
        if info.placement(ranks, stages) == program.placement:
            found.append(info(ranks, stages, program.num_microbatches))
    return found


class _Judge:
    """Keeps the best program by the real simulator, among those that fit."""

    def __init__(
        self, costs: StageCosts, edges: Edges, limits: Sequence[float], objective: Objective
    ) -> None:
        self.costs, self.edges, self.limits, self.objective = costs, edges, limits, objective
        self.best: tuple[Program, Timeline, str] | None = None

    def consider(self, program: Program, timeline: Timeline, start: str) -> None:
        slack = 1 + 1e-9
        if any(h > m * slack for h, m in zip(timeline.peak_memory, self.limits, strict=True)):
            return
        length = _length(timeline, self.objective)
        if self.best is None or length < _length(self.best[1], self.objective) * (1 - 1e-12):
            self.best = (program, timeline, start)

    def consider_orders(self, orders: Orders, timing: Timing) -> None:
        start = orders.program
        program = replace(start, ranks=timing.ranks, name=f"improved {start.name}".strip())
        name = start.name or "the program given"
        self.consider(program, simulate(program, self.costs, self.edges), name)

    def bound(self, program: Program) -> float:
        """A time that no order is below; from step to step, that is the busiest rank's work."""
        if self.objective == "step":
            return lower_bound(program, self.costs, self.edges, self.limits)
        return max(simulate(program, self.costs, self.edges).busy)


_Start = tuple[Orders, Timing, list[float]]


def _best_starts(program: Program, others: Sequence[Program], judge: _Judge) -> list[_Start]:
    """Starts that fit, quickest first; each with the patience that suits it best."""
    splits = any(a.kind is Kind.BACKWARD_INPUT for p in (program, *others) for a in _parts(p))
    found: list[_Start] = []
    for start in (program, *others):
        if start is not program:
            timeline = simulate(start, judge.costs, judge.edges)
            judge.consider(start, timeline, start.name or "the program given")
        variant = _split(start) if splits else start
        orders = Orders(variant, judge.costs, judge.edges, judge.limits, judge.objective)
        patiences = [[patience] * program.num_ranks for patience in _PATIENCE]
        tried = [(orders, orders.fill(orders.main, patience), patience) for patience in patiences]
        options = [(o, timing, patience) for o, timing, patience in tried if timing is not None]
        if options:
            found.append(min(options, key=lambda option: option[1].length))
    return sorted(found, key=lambda option: option[1].length)


def _parts(program: Program) -> Iterator[Action]:
    for actions in program.ranks:
        for action in actions:
            yield from action.each


def _split(program: Program) -> Program:
    """Every backward as its two halves, every pair as its parts."""
    ranks = []
    for actions in program.ranks:
        order: list[Action] = []
        for part in (p for action in actions for p in action.each):
            if part.kind is Kind.BACKWARD:
                order.append(part._replace(kind=Kind.BACKWARD_INPUT))
                order.append(part._replace(kind=Kind.BACKWARD_WEIGHT))
            else:
                order.append(part)
        ranks.append(order)
    return Program.of(program.placement, program.num_microbatches, ranks, name=program.name)


def _anneal(
    orders: Orders,
    timing: Timing,
    patience: list[float],
    rng: random.Random,
    budget: int,
    goal: float,
) -> Timing:
    """Simulated annealing until the goal is met or the budget is spent.

    The score is the length and a little of all ranks' spans, since many changes that lead
    somewhere leave the length alone at first.
    """
    main, best, score = orders.main, timing, _score(timing)
    num_actions = sum(map(len, timing.ranks))
    unit = timing.length * len(timing.ranks) / num_actions
    rounds = budget // num_actions
    for turn in range(rounds):
        if best.length <= goal * (1 + 1e-9):
            break
        heat = unit * 0.2 * 0.05 ** (turn / rounds)
        changed: Ranks | None = main
        waits = list(patience)
        if rng.random() < 0.05:
            waits[rng.randrange(len(waits))] = rng.choice(_PATIENCE)
        else:
            changed = orders.moved(main, timing, rng)
        tried = None if changed is None else orders.fill(changed, waits)
        if changed is None or tried is None:
            continue
        worse = _score(tried) - score
        if worse <= 0 or rng.random() < math.exp(-worse / heat):
            main, patience, timing, score = changed, waits, tried, score + worse
            if tried.length < best.length * (1 - 1e-12):
                best = tried
    return best


def _score(timing: Timing) -> float:
    return timing.length + 0.3 * math.fsum(timing.spans) / len(timing.spans)


def _shortage(program: Program, timeline: Timeline, limits: Sequence[float]) -> str:
    lines = [
        f"  rank {rank} holds {held:.6g}, may hold {limit:.6g}, missing {held - limit:.6g}"
        for rank, (held, limit) in enumerate(zip(timeline.peak_memory, limits, strict=True))
        if held > limit
    ]
    return (
        f"neither {program.name or 'the program'} nor a named schedule with the same placement "
        "fits into the memory; the program given:\n" + "\n".join(lines)
    )
