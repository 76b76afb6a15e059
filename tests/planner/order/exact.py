"""The best possible order of a small program, by constraint programming (ortools).

In:  a compute-only program (whose actions are to be ordered), costs, a memory limit.
Out: a program with the least makespan, and a bound that is proven even if time runs out.

Each rank is a machine that does one action at a time; what an action reads must have
arrived; what a rank holds must stay below its limit at all times. Microbatches of one
kind and stage keep their order, which costs nothing since they are alike. Solving
takes seconds for tens of actions per rank and is hopeless for thousands: this is the yardstick for
`improve`, not its replacement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ortools.sat.python import cp_model

from fxpipe.errors import PlanError
from fxpipe.planner.order.improve import limits_of
from fxpipe.program import (
    Action,
    Edges,
    Kind,
    Program,
    StageCosts,
    ValueKind,
    reads,
    simulate,
    validate,
    writes,
)

__all__ = ["Optimum", "optimum"]

_MOST_TICKS = 20_000
"""Times are whole numbers for the solver: at most so many to the work of the fullest rank."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best program found, its makespan, and what no program can be below."""

    program: Program
    makespan: float
    bound: float

    @property
    def is_proven(self) -> bool:
        return self.makespan <= self.bound * (1 + 1e-4)


def optimum(
    program: Program,
    costs: StageCosts,
    memory_limit: float | tuple[float, ...] | None = None,
    *,
    edges: Edges | None = None,
    seconds: float = 30.0,
    workers: int = 1,
) -> Optimum:
    """Order the actions of a program so that it ends as early as possible.

    Raises:
        PlanError: no order fits into the memory.
    """
    edges = edges or Edges.chain(program.num_stages)
    limits = limits_of(program, math.inf if memory_limit is None else memory_limit)
    orders = _Numbered(program, costs, limits)
    needs = _needs(orders, costs, edges)
    model = cp_model.CpModel()
    scale = _whole_numbers([*orders.durations, *(lag for n in needs for _, lag in n)])
    scale = min(scale, _MOST_TICKS / max(_loads(orders)))
    horizon = math.ceil(3 * scale * sum(_loads(orders)))
    starts, ends = _add_actions(model, orders, needs, scale, horizon)
    _add_memory(model, orders, costs, starts, ends)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, list(ends))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise PlanError(f"no order found within {seconds} s: {solver.status_name(status)}")
    ranks = [tuple(sorted(rank, key=lambda n: solver.value(ends[n]))) for rank in orders.ranks]
    actions = [[orders.actions[number] for number in rank] for rank in ranks]
    name = f"{program.name} optimum".strip()
    best = Program.of(program.placement, program.num_microbatches, actions, name=name)
    validate(best, edges)
    makespan = simulate(best, costs, edges).makespan
    # Rounding a duration moves every path by at most half a tick.
    is_rounded = any(abs(d * scale - round(d * scale)) > 1e-6 for d in orders.durations)
    slack = len(orders.actions) / 2 if is_rounded else 0
    bound = max((solver.best_objective_bound - slack) / scale, 0.0)
    return Optimum(best, makespan, min(bound, makespan))


class _Numbered:
    """A program's actions as numbers; `before[n]` must come earlier on the same rank."""

    def __init__(self, program: Program, costs: StageCosts, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.actions = [action for actions in program.ranks for action in actions]
        self.rank_of = [rank for rank, actions in enumerate(program.ranks) for _ in actions]
        self.ranks = [
            [n for n, where in enumerate(self.rank_of) if where == rank]
            for rank in range(program.num_ranks)
        ]
        self.durations = [costs.compute(action.kind, action.stage) for action in self.actions]
        number = {action: n for n, action in enumerate(self.actions)}
        # Microbatches are alike: of one kind and stage they keep their order.
        self.before = [
            number[action._replace(microbatch=action.microbatch - 1)] if action.microbatch else None
            for action in self.actions
        ]


def _loads(orders: _Numbered) -> list[float]:
    return [math.fsum(orders.durations[n] for n in rank) for rank in orders.ranks]


def _whole_numbers(values: list[float]) -> float:
    """A factor that makes all values whole numbers, nearly."""
    fractions = [Fraction(value).limit_denominator(10_000) for value in values]
    above = math.gcd(*(f.numerator for f in fractions)) or 1
    return math.lcm(*(f.denominator for f in fractions)) / above


def _needs(orders: _Numbered, costs: StageCosts, edges: Edges) -> list[list[tuple[int, float]]]:
    """For each action those that make what it reads, and how long the way takes."""
    maker = {v: n for n, action in enumerate(orders.actions) for v in writes(action, edges)}
    found: list[list[tuple[int, float]]] = []
    for here, action in zip(orders.rank_of, orders.actions, strict=True):
        needs = []
        for value in reads(action, edges):
            there = orders.rank_of[maker[value]]
            size = costs.value_bytes(value.kind, value.stage, value.peer)
            needs.append(
                (maker[value], 0.0 if there == here else costs.transfer(there, here, size))
            )
        found.append(needs)
    return found


def _add_actions(
    model: Any,
    orders: _Numbered,
    needs: list[list[tuple[int, float]]],
    scale: float,
    horizon: int,
) -> tuple[list[Any], list[Any]]:
    starts, ends, intervals = [], [], []
    for number, duration in enumerate(orders.durations):
        starts.append(model.new_int_var(0, horizon, f"s{number}"))
        ends.append(model.new_int_var(0, horizon, f"e{number}"))
        intervals.append(
            model.new_interval_var(starts[-1], round(duration * scale), ends[-1], f"i{number}")
        )
    for rank in orders.ranks:
        model.add_no_overlap([intervals[n] for n in rank])
    for number in range(len(orders.actions)):
        for made, lag in needs[number]:
            model.add(starts[number] >= ends[made] + round(lag * scale))
        before = orders.before[number]
        if before is not None:
            model.add(starts[number] >= ends[before])
    return starts, ends


def _add_memory(
    model: Any, orders: _Numbered, costs: StageCosts, starts: list[Any], ends: list[Any]
) -> None:
    """Bound what each rank holds, as a pile of lifetimes from one action to another."""
    number_of = {
        part: number
        for number, action in enumerate(orders.actions)
        for part in action.parts or (action,)
    }
    for rank, numbers in enumerate(orders.ranks):
        if math.isinf(orders.limits[rank]):
            continue
        lives: list[tuple[Any, Any, float]] = []
        for part in (p for n in numbers for p in orders.actions[n].parts or (orders.actions[n],)):
            if part.kind is Kind.FORWARD:
                lives += _lives(costs, part, number_of, starts, ends)
        unit = 1 / _whole_numbers([size for _, _, size in lives])
        room = math.floor(orders.limits[rank] / unit + 1e-6)
        intervals, sizes = [], []
        for index, (start, end, size) in enumerate(lives):
            length = model.new_int_var(0, 1 << 40, f"l{rank}_{index}")
            intervals.append(model.new_interval_var(start, length, end, f"m{rank}_{index}"))
            sizes.append(round(size / unit))
        model.add_cumulative(intervals, sizes, room)


def _lives(
    costs: StageCosts,
    forward: Action,
    number_of: dict[Action, int],
    starts: list[Any],
    ends: list[Any],
) -> list[tuple[Any, Any, float]]:
    """From when to when a forward's residual, and what is deferred of it, is held."""
    begin = starts[number_of[forward]]
    residual, deferred = (
        costs.value_bytes(kind, forward.stage, forward.stage)
        for kind in (ValueKind.RESIDUAL, ValueKind.DEFERRED)
    )
    whole = number_of.get(forward._replace(kind=Kind.BACKWARD))
    if whole is not None:
        return [(begin, ends[whole], residual)]
    half = ends[number_of[forward._replace(kind=Kind.BACKWARD_INPUT)]]
    last = ends[number_of[forward._replace(kind=Kind.BACKWARD_WEIGHT)]]
    if residual == deferred:
        return [(begin, last, residual)]
    return [(begin, half, residual), (half, last, deferred)]
