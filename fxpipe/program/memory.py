"""Work out how much memory each rank holds over time, from the lifetimes of values.

In:  the spans of a simulated step and the bytes of each kind of value.
Out: for each rank a curve of `(time, bytes)`.

A value lives on its rank from the start of the action that writes it to the end of
the action that reads it last. Five things differ. Deferred weight work takes the
place of the residual, so it starts when its BACKWARD_INPUT ends. A value that is sent
lives until it is sent, and on the other rank from the posting of its receive (a
buffer must be there). A residual that is offloaded is away from the end of its OFFLOAD to
the start of its RELOAD. Weight gradients are one buffer per stage, which stays. What
nobody reads, such as the residual of a forward-only program, goes with its action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fxpipe.program.action import (
    COMPUTE_KINDS,
    Action,
    Edges,
    Kind,
    Value,
    ValueKind,
    reads,
    writes,
)
from fxpipe.program.costs import StageCosts
from fxpipe.program.program import Program
from fxpipe.program.timeline import Span

__all__ = ["Lifetimes", "kept_at_ends", "lifetimes", "memory_curves"]

Curve = tuple[tuple[float, float], ...]


def memory_curves(
    program: Program,
    costs: StageCosts,
    edges: Edges,
    spans: Mapping[tuple[int, int], Span],
    posted: Mapping[tuple[int, int], float],
) -> tuple[Curve, ...]:
    """One curve per rank, from spans by rank and position; `posted` is when receives were."""
    changes: list[list[tuple[float, float]]] = [[] for _ in program.ranks]
    effects = _compute_effects(program, costs, edges)
    has_gradient: set[int] = set()
    moved: dict[tuple[Kind, int, int | None], float] = {}
    in_order = sorted(spans.items(), key=lambda item: item[1].start)
    for place, (rank, action, start, end) in in_order:
        here = changes[rank]
        kind = action.kind
        if kind.is_compute or action.parts:
            for part in action.each:
                effect = effects[part.kind][part.stage]
                here += ((start, effect.at_start), (end, effect.at_end))
                for other, num_bytes in effect.elsewhere:
                    changes[other].append((end, num_bytes))
                if effect.gradient and part.stage not in has_gradient:
                    has_gradient.add(part.stage)
                    here.append((start, effect.gradient))
        elif kind is Kind.UNSHARD:
            here.append((start, costs.unsharded_bytes(action.stage)))
        elif kind is Kind.RESHARD:
            here.append((end, -costs.unsharded_bytes(action.stage)))
        elif kind.is_offload:
            held = costs.value_bytes(ValueKind.RESIDUAL, action.stage, action.stage)
            here.append((end, -held) if kind is Kind.OFFLOAD else (start, held))
        elif kind.is_transfer:
            route = (kind, action.stage, action.peer)
            if route not in moved:
                values = (*reads(action, edges), *writes(action, edges))
                moved[route] = sum(costs.value_bytes(v.kind, v.stage, v.peer) for v in values)
            if moved[route]:
                is_buffer = place in posted
                here.append((posted[place], moved[route]) if is_buffer else (end, -moved[route]))
    return tuple(_curve(change) for change in changes)


class Lifetimes(NamedTuple):
    """What a compute action does to values: the one rule for how long they live.

    `born` are there from its start on and `born_late` from its end on; `freed` are gone at
    its end. `weight_grad` is the buffer that the first such action of a stage takes.
    """

    born: tuple[Value, ...]
    born_late: tuple[Value, ...]
    freed: tuple[Value, ...]
    weight_grad: Value | None


def lifetimes(action: Action, edges: Edges) -> Lifetimes:
    """Which values begin and end to live with a compute action, from the table."""
    written = writes(action, edges)
    once = [value for value in written if value.kind is ValueKind.WEIGHT_GRAD]
    return Lifetimes(
        tuple(v for v in written if v.kind not in (ValueKind.DEFERRED, ValueKind.WEIGHT_GRAD)),
        tuple(v for v in written if v.kind is ValueKind.DEFERRED),
        reads(action, edges),
        once[0] if once else None,
    )


def kept_at_ends(
    num_bytes: Callable[[ValueKind, int], float], num_stages: int
) -> Callable[[Action], tuple[float, float]]:
    """What an action adds to what its rank keeps for backwards: at its start, and at its end.

    Kept are residuals and deferred weight work, of `num_bytes(kind, stage)` each.
    """
    alone = Edges(num_stages, ())

    def change(kind: Kind, stage: int) -> tuple[float, float]:
        born, late, freed, _ = lifetimes(Action(kind, stage, 0), alone)
        size = [sum(num_bytes(v.kind, stage) for v in values) for values in (born, late, freed)]
        return size[0], size[1] - size[2]

    table = [[change(kind, stage) for stage in range(num_stages)] for kind in COMPUTE_KINDS]

    def kept(action: Action) -> tuple[float, float]:
        kind, stage, _, _, parts = action
        if not parts:
            return table[kind][stage]
        at_start, at_end = zip(*(table[part.kind][part.stage] for part in parts), strict=True)
        return sum(at_start), sum(at_end)

    return kept


class _Effect(NamedTuple):
    """How one compute action changes memory; `elsewhere` holds `(rank, bytes)` at its end."""

    at_start: float
    at_end: float
    elsewhere: tuple[tuple[int, float], ...]
    gradient: float


def _compute_effects(program: Program, costs: StageCosts, edges: Edges) -> list[list[_Effect]]:
    rank_of = program.placement.stage_to_rank
    is_lowered = program.is_lowered

    def num_bytes(value: Value) -> float:
        return costs.value_bytes(value.kind, value.stage, value.peer)

    def effect(action: Action) -> _Effect:
        born, late, freed, weight_grad = lifetimes(action, edges)
        elsewhere: list[tuple[int, float]] = []
        at_end = sum(map(num_bytes, late)) - sum(map(num_bytes, freed))
        for value in born:
            if value.kind is ValueKind.RESIDUAL and not program.has_backward:
                at_end -= num_bytes(value)
            if rank_of[value.peer] != rank_of[value.stage] and not is_lowered:
                at_end -= num_bytes(value)
                elsewhere.append((rank_of[value.peer], num_bytes(value)))
        gradient = 0.0 if weight_grad is None else num_bytes(weight_grad)
        return _Effect(sum(map(num_bytes, born)), at_end, tuple(elsewhere), gradient)

    return [
        [effect(Action(kind, stage, 0)) for stage in range(program.num_stages)]
        for kind in COMPUTE_KINDS
    ]


def _curve(changes: list[tuple[float, float]]) -> Curve:
    """Add up changes; what happens at one time happens at once."""
    at_time: dict[float, float] = {}
    for time, change in changes:
        at_time[time] = at_time.get(time, 0.0) + change
    curve: list[tuple[float, float]] = []
    held = 0.0
    for time in sorted(at_time):
        if at_time[time]:
            held += at_time[time]
            curve.append((time, held))
    return tuple(curve)
