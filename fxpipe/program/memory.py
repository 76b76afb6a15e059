"""Work out how much memory each rank holds over time, from the lifetimes of values.

In:  the spans of a simulated step and the bytes of each kind of value.
Out: for each rank a curve of `(time, bytes)`.

A value lives on its rank from the start of the action that writes it to the end of
the action that reads it last. Four things differ. Deferred weight work takes the
place of the residual, so it starts when its BACKWARD_INPUT ends. A value that is sent
lives until it is sent, and on the other rank from the posting of its receive (a
buffer must be there). Weight gradients are one buffer per stage, which stays. What
nobody reads, such as the residual of a forward-only program, goes with its action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpipe.program.action import Action, Edges, Kind, Value, ValueKind, reads, writes
from fxpipe.program.costs import Costs
from fxpipe.program.play.numbering import COMPUTE_KINDS
from fxpipe.program.program import Program
from fxpipe.program.timeline import Span

__all__ = ["memory_curves"]

Curve = tuple[tuple[float, float], ...]


def memory_curves(
    program: Program,
    costs: Costs,
    edges: Edges,
    spans: Sequence[Span],
    posted: Mapping[int, float],
) -> tuple[Curve, ...]:
    """One curve per rank; `posted[i]` is when the receive with span i was posted."""
    changes: list[list[tuple[float, float]]] = [[] for _ in program.ranks]
    effects = _compute_effects(program, costs, edges)
    has_gradient: set[int] = set()
    moved: dict[tuple[Kind, int, int | None], float] = {}
    for index, (rank, action, start, end) in enumerate(spans):
        here = changes[rank]
        kind = action.kind
        if kind <= 3 or action.parts:
            for part in action.parts or (action,):
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
        elif kind.is_transfer:
            route = (kind, action.stage, action.peer)
            if route not in moved:
                values = (*reads(action, edges), *writes(action, edges))
                moved[route] = sum(_bytes(costs, value) for value in values)
            if moved[route]:
                is_buffer = index in posted
                here.append((posted[index], moved[route]) if is_buffer else (end, -moved[route]))
    return tuple(_curve(change) for change in changes)


class _Effect(NamedTuple):
    """How one compute action changes memory.

    `elsewhere` holds `(rank, bytes)` at its end; `gradient` is the buffer that the first
    such action of a stage takes.
    """

    at_start: float
    at_end: float
    elsewhere: tuple[tuple[int, float], ...]
    gradient: float


def _compute_effects(program: Program, costs: Costs, edges: Edges) -> list[list[_Effect]]:
    rank_of = program.placement.stage_to_rank
    is_lowered = program.is_lowered
    kinds = {part.kind for acts in program.ranks for a in acts for part in a.parts or (a,)}
    has_backward = not kinds.isdisjoint(COMPUTE_KINDS[1:])

    def effect(action: Action) -> _Effect:
        at_start, at_end = 0.0, 0.0
        elsewhere: list[tuple[int, float]] = []
        gradient = 0.0
        for value in writes(action, edges):
            num_bytes = _bytes(costs, value)
            if value.kind is ValueKind.WEIGHT_GRAD:
                gradient = num_bytes
            elif value.kind is ValueKind.DEFERRED:
                at_end += num_bytes
            else:
                at_start += num_bytes
            if value.kind is ValueKind.RESIDUAL and not has_backward:
                at_end -= num_bytes
            if rank_of[value.peer] != rank_of[value.stage] and not is_lowered:
                at_end -= num_bytes
                elsewhere.append((rank_of[value.peer], num_bytes))
        at_end -= sum(_bytes(costs, value) for value in reads(action, edges))
        return _Effect(at_start, at_end, tuple(elsewhere), gradient)

    return [
        [effect(Action(kind, stage, 0)) for stage in range(program.num_stages)]
        for kind in COMPUTE_KINDS
    ]


def _bytes(costs: Costs, value: Value) -> float:
    return costs.value_bytes(value.kind, value.stage, value.peer)


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
