"""The cost of one node as formulas of the sizes.

In:  a `Bench`, a node, the sizes of the traced call, and which of them may vary.
Out: a `NodeCost`: each operation's FLOPs and bytes, and what is kept, as polynomials.

A node is observed at a few sizes, a polynomial is put through what was seen, and one more
observation must confirm it, exactly. Degrees start at one for the batch and two for other
sizes and go up by one if the check fails; what is still not a polynomial then is marked
(`is_exact`), and is right at the sizes tried.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from fxpipe.errors import FxpipeError
from fxpipe.graph.dims import evaluate
from fxpipe.planner.cost.hardware import Hardware, OpClass
from fxpipe.planner.cost.node_runs import Bench, Sizes
from fxpipe.planner.cost.polynomial import Polynomial, fit
from fxpipe.planner.cost.watch import Observation, Op

__all__ = ["PHASES", "NodeCost", "OpCost", "Phase", "cost_of"]

Phase = str
PHASES: tuple[Phase, ...] = ("forward", "backward_input", "backward_weight")

_BYTES = ("kept_inside", "deferred")
# A peak is the greatest of several formulas; the one through the sizes tried has to do.
_PEAKS = ("forward_peak", "backward_peak")


@dataclass(frozen=True, slots=True)
class OpCost:
    """One operation, or several of a kind, with formulas for numbers."""

    op_class: OpClass
    dtype: str
    flops: Polynomial
    num_bytes: Polynomial
    made_bytes: Polynomial
    count: int = 1

    def time(self, hardware: Hardware, sizes: Sizes) -> float:
        flops, moved = self.flops(sizes) / self.count, self.num_bytes(sizes) / self.count
        return self.count * hardware.time(self.op_class, self.dtype, flops, moved)


@dataclass(frozen=True)
class NodeCost:
    """What one node costs; see `Observation` for what the fields mean."""

    ops: Mapping[Phase, tuple[OpCost, ...]]
    kept_inside: Polynomial
    forward_peak: Polynomial
    backward_peak: Polynomial
    deferred: Polynomial
    keeps_input: tuple[bool, ...]
    keeps_output: tuple[bool, ...]
    alias: tuple[int | None, ...]
    is_exact: bool
    is_rough: bool

    def flops(self, phase: Phase) -> Polynomial:
        """All FLOPs of a phase."""
        return sum((op.flops for op in self.ops[phase]), Polynomial.constant(0))

    def num_bytes(self, phase: Phase) -> Polynomial:
        """All bytes that the operations of a phase read and write."""
        return sum((op.num_bytes for op in self.ops[phase]), Polynomial.constant(0))

    def time(self, phase: Phase, hardware: Hardware, sizes: Sizes) -> float:
        """How long a phase takes on some hardware."""
        return sum(op.time(hardware, sizes) for op in self.ops[phase])

    def cheap_time(self, hardware: Hardware, sizes: Sizes) -> float:
        """The part of the forward that is not products: what selective checkpointing repeats."""
        ops = self.ops["forward"]
        return sum(op.time(hardware, sizes) for op in ops if op.op_class == "memory")

    def product_bytes(self, sizes: Sizes) -> float:
        """The results of products in the forward: what selective checkpointing keeps."""
        ops = self.ops["forward"]
        return sum(op.made_bytes(sizes) for op in ops if op.op_class != "memory")


def cost_of(bench: Bench, node: fx.Node, example: Sizes, vary: Sequence[str]) -> NodeCost:
    """Find the formulas for a node; sizes that are not in `vary` stay as in the example."""
    names = [name for name in vary if name in example]
    degrees = {name: 1 if name == "batch" else 2 for name in names}
    found: NodeCost | None = None
    for extra in (0, 1):
        grid = {
            name: points
            for name in names
            if (points := _points(bench, name, example, degrees[name] + extra + 1)) is not None
        }
        found = _fitted(bench, node, example, grid)
        if found.is_exact:
            break
    assert found is not None
    return found


def _points(bench: Bench, name: str, example: Sizes, count: int) -> tuple[int, ...] | None:
    """Sizes to try for one symbol, all allowed; None if there are too few."""
    size = example[name]
    # One is special: broadcasting and kernels differ there, so it says little about others.
    near = [2, 3, 5, 7, 11] if name == "batch" else []
    near += [size, size // 2, size // 4, 3 * size // 4, size // 8, size + 1, size + 2, 2 * size]
    allowed = [
        option
        for option in dict.fromkeys(near)
        if option >= 2 and _is_allowed(bench, {**example, name: option})
    ]
    return tuple(allowed[: count + 1]) if len(allowed) > count else None


def _is_allowed(bench: Bench, sizes: Sizes) -> bool:
    return all(bool(evaluate(c, sizes)) for c in bench.traced.inputs.conditions)


def _fitted(
    bench: Bench, node: fx.Node, example: Sizes, grid: Mapping[str, Sequence[int]]
) -> NodeCost:
    """Fit on all but the last size of each symbol; the last ones are the check."""
    axes = {name: points[:-1] for name, points in grid.items()}
    seen = {
        point: bench.observe(node, {**example, **dict(zip(axes, point, strict=True))})
        for point in itertools.product(*axes.values())
    }
    first = next(iter(seen.values()))
    is_alike = all(_shape(other) == _shape(first) for other in seen.values())

    def formula(number: Callable[[Observation], int]) -> Polynomial:
        return fit(axes, {point: number(observation) for point, observation in seen.items()})

    ops: dict[Phase, tuple[OpCost, ...]] = {}
    for phase in PHASES:
        if is_alike:
            ops[phase] = tuple(
                _op_cost(op, formula, partial(_nth, phase, index))
                for index, op in enumerate(getattr(first, phase))
            )
        else:
            ops[phase] = _by_class(first, phase, formula)
    sizes = {name: formula(operator.attrgetter(name)) for name in (*_BYTES, *_PEAKS)}
    last = {name: points[-1] for name, points in grid.items()}
    cost = NodeCost(
        ops=ops,
        keeps_input=first.keeps_input,
        keeps_output=first.keeps_output,
        alias=first.alias,
        is_exact=True,
        is_rough=first.is_rough,
        **sizes,
    )
    if not grid or _confirms(bench, node, cost, {**example, **last}):
        return cost
    return replace(cost, is_exact=False)


def _shape(observation: Observation) -> tuple[Any, ...]:
    return tuple(
        tuple((op.name, op.op_class, op.dtype) for op in getattr(observation, phase))
        for phase in PHASES
    )


def _nth(phase: Phase, index: int, observation: Observation) -> list[Op]:
    return [getattr(observation, phase)[index]]


def _op_cost(
    op: Op,
    formula: Callable[[Callable[[Observation], int]], Polynomial],
    pick: Callable[[Observation], Sequence[Op]],
    count: int = 1,
) -> OpCost:
    return OpCost(
        op.op_class,
        op.dtype,
        formula(lambda o: sum(found.flops for found in pick(o))),
        formula(lambda o: sum(found.num_bytes for found in pick(o))),
        formula(lambda o: sum(found.made_bytes for found in pick(o))),
        count,
    )


def _by_class(
    first: Observation,
    phase: Phase,
    formula: Callable[[Callable[[Observation], int]], Polynomial],
) -> tuple[OpCost, ...]:
    """One entry per class and dtype, for nodes whose operations differ from size to size."""
    groups: dict[tuple[OpClass, str], list[Op]] = {}
    for op in getattr(first, phase):
        groups.setdefault((op.op_class, op.dtype), []).append(op)

    def pick(key: tuple[OpClass, str], observation: Observation) -> list[Op]:
        return [op for op in getattr(observation, phase) if (op.op_class, op.dtype) == key]

    return tuple(
        _op_cost(ops[0], formula, partial(pick, key), len(ops)) for key, ops in groups.items()
    )


def _confirms(bench: Bench, node: fx.Node, cost: NodeCost, sizes: Sizes) -> bool:
    """Whether one more observation agrees with the formulas."""
    try:
        seen = bench.observe(node, sizes)
    except FxpipeError:
        return False
    flops = all(
        cost.flops(phase)(sizes) == sum(op.flops for op in getattr(seen, phase))
        and cost.num_bytes(phase)(sizes) == sum(op.num_bytes for op in getattr(seen, phase))
        for phase in PHASES
    )
    return flops and all(getattr(cost, name)(sizes) == getattr(seen, name) for name in _BYTES)
