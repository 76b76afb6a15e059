"""Give the sizes of the example inputs names, and learn which of them may change.

Each dimension of each input tensor gets a symbol. Equal sizes at the same position
share one, so the batch of ids and mask is a single `batch`; a size that is equal
by coincidence at another position does not. While the model runs on fake
tensors, torch's ShapeEnv finds out which sizes the model insists on; those become
ordinary numbers again. What opened code decided by looking at a size is kept as
a condition that later inputs must meet.

In:  example inputs, and which (input, path, dimension) may vary.
Out: fake inputs, and afterwards the names, conditions and sizes that are left.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxpipe.graph.dims import evaluate, free_names, holds, plain, solve, symbol
from fxpipe.graph.facts import map_arguments
from fxpipe.graph.inputs import path_text
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import Accessor, Args, Size, Symbolic, map_leaves, walk
from fxpipe.graph.source_line import Place, user_frame
from fxpipe.torch_inside import (
    FakeTensorMode,
    conditions_of,
    constant_source,
    floor_div,
    known_sizes,
    take_back,
    watch_replacements,
)

__all__ = [
    "InputDim",
    "Sizes",
    "TracedSizes",
    "Values",
    "all_dims",
    "exprs_in",
    "flat",
    "number_at",
]

Values = Mapping[sympy.Symbol, int]
DeviceOf = Callable[[torch.Tensor], torch.device]


@dataclasses.dataclass(frozen=True, slots=True)
class InputDim:
    """One dimension of one tensor in the model's inputs."""

    path: tuple[Accessor, ...]
    dim: int

    def __str__(self) -> str:
        return f"{path_text(self.path)} dimension {self.dim}"


def all_dims(inputs: Mapping[str, object]) -> dict[InputDim, sympy.Expr]:
    """Name every dimension that could vary; equal sizes at one position share a name."""
    tensors = [(path, leaf) for path, leaf in walk(dict(inputs)) if isinstance(leaf, torch.Tensor)]
    deepest = max((tensor.dim() for _, tensor in tensors), default=0)
    names: dict[InputDim, sympy.Expr] = {}
    taken: set[str] = set()
    for dim in range(deepest):
        groups: dict[int, list[tuple[tuple[Accessor, ...], torch.Tensor]]] = {}
        for path, tensor in tensors:
            if dim < tensor.dim():
                groups.setdefault(int(tensor.shape[dim]), []).append((path, tensor))
        for size, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            if size <= 1 and len(groups) > 1:
                continue  # next to other sizes, one row is there to be broadcast
            name = _group_name(dim, members, taken)
            taken.add(name)
            names.update({InputDim(path, dim): symbol(name) for path, _ in members})
    return names


def _group_name(
    dim: int, members: list[tuple[tuple[Accessor, ...], torch.Tensor]], taken: set[str]
) -> str:
    if dim == 0 and "batch" not in taken:
        return "batch"
    is_sequence = any(not tensor.is_floating_point() or tensor.dim() == 3 for _, tensor in members)
    if dim == 1 and is_sequence and "sequence" not in taken:
        return "sequence"
    name = {2: "height", 3: "width"}.get(dim, "")
    is_image = all(tensor.is_floating_point() and tensor.dim() == 4 for _, tensor in members)
    if name and is_image and name not in taken:
        return name
    path, _ = members[0]
    stem = "_".join(str(key) for _, key in path)
    return f"{stem}_{dim}"


class TracedSizes(ShapeEnv):
    """A ShapeEnv that remembers where in the user's code a symbol lost its freedom."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.settled: dict[sympy.Symbol, tuple[sympy.Basic, Place]] = {}
        self.trace: Callable[[], Any] = lambda: None  # told when a size has become a number
        watch_replacements(self, self._settle)

    def _settle(self, symbol: sympy.Symbol, value: sympy.Basic) -> None:
        self.settled[symbol] = (value, user_frame())
        trace = self.trace()
        if trace is not None and not value.free_symbols:
            trace.on_settled()


class Sizes:
    """The symbols of one trace."""

    def __init__(self, mode: FakeTensorMode, dims: Mapping[InputDim, sympy.Expr]) -> None:
        self._mode = mode
        self._dims = dims
        self._sizes: dict[str, torch.SymInt] = {}
        self._names: dict[sympy.Symbol, sympy.Expr] = {}
        self._decisions: dict[sympy.Basic, None] = {}
        self._stand_ins: set[sympy.Symbol] = set()

    @property
    def env(self) -> ShapeEnv:
        env = self._mode.shape_env
        assert env is not None
        return env

    def fake(self, inputs: Mapping[str, object], device_of: DeviceOf) -> dict[str, object]:
        """Return the inputs with every tensor replaced by a fake one."""
        paths = iter([path for path, _ in walk(dict(inputs))])

        def one(leaf: object) -> object:
            path = next(paths)
            return (
                self._fake_tensor(path, leaf, device_of) if isinstance(leaf, torch.Tensor) else leaf
            )

        result: dict[str, object] = map_leaves(one, dict(inputs))
        return result

    def _fake_tensor(
        self, path: tuple[Accessor, ...], tensor: torch.Tensor, device_of: DeviceOf
    ) -> torch.Tensor:
        shape = [
            self._size(wanted, int(size))
            if (wanted := self._dims.get(InputDim(path, dim))) is not None
            else int(size)
            for dim, size in enumerate(tensor.shape)
        ]
        with self._mode, torch.inference_mode(False):
            made = torch.empty(shape, dtype=tensor.dtype, device=device_of(tensor))
            if tensor.requires_grad:
                made.requires_grad_(True)
                if not tensor.is_leaf:
                    made = made.view_as(made)
        return made

    def _size(self, wanted: sympy.Expr, example: int) -> Size:
        if isinstance(wanted, sympy.Symbol):
            return self._symbol(wanted.name, example)
        (name,) = free_names(wanted)
        root = solve(wanted, name, example)
        assert root is not None, f"{wanted} cannot be {example}"
        size: Size = evaluate(wanted, {name: self._symbol(name, root)})  # type: ignore[dict-item]
        return size

    def _symbol(self, name: str, example: int) -> torch.SymInt:
        if name not in self._sizes:
            # ShapeEnv treats 0 and 1 as special; let such an example stand for 2.
            made, self._sizes[name] = self._new(name, max(example, 2))
            self._names[made] = symbol(name)
        return self._sizes[name]

    def stand_in(self, hint: int) -> tuple[sympy.Symbol, torch.SymInt]:
        """Return a new symbol; conditions on it are none of the model's."""
        made, size = self._new(f"stand_in_{len(self._stand_ins)}", hint)
        self._stand_ins.add(made)
        return made, size

    def _new(self, name: str, hint: int) -> tuple[sympy.Symbol, Any]:
        source = constant_source(name)
        made = self.env.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        return made, self.env.create_symintnode(made, hint=hint, source=source)

    def mark(self) -> int:
        """Return where the conditions stand now, for `met_since`."""
        return len(self.env.guards)

    def conditions_so_far(self) -> tuple[object, ...]:
        """Return what is known of the sizes, for `take_back`."""
        return conditions_of(self.env), self.decisions()

    def take_back(self, before: tuple[Any, ...]) -> None:
        """Forget what sizes have met since then: code that has failed leaves no condition."""
        take_back(self.env, before[0])
        self.forget(before[1])

    def met_since(self, mark: int) -> list[sympy.Basic]:
        """Return the conditions on stand-ins since then; decisions about them are taken back."""
        met = [guard.expr for guard in self.env.guards[mark:] if isinstance(guard.expr, sympy.Eq)]
        for expr in [expr for expr in self._decisions if expr.free_symbols & self._stand_ins]:
            del self._decisions[expr]
            met.append(expr if bool(expr.xreplace(known_sizes(self.env))) else sympy.Not(expr))
        return [expr for expr in met if expr.free_symbols & self._stand_ins]

    def insist(self, condition: sympy.Basic, ours: sympy.Basic) -> None:
        """Make a condition on stand-ins one of the model, where it is the second."""
        if not isinstance(ours, sympy.Eq):
            self._decisions[ours] = None
            return
        settled = getattr(self.env, "settled", {})
        before = set(settled)
        places = [settled[s][1] for s in condition.free_symbols if s in settled]
        self.env.evaluate_expr(ours)
        for made in set(settled) - before:
            settled[made] = (settled[made][0], *places[:1]) if places else settled[made]

    def decided(self, value: Symbolic, *, inside_leaf: bool = False) -> None:
        """Remember that code looked at a symbolic number to decide something.

        A leaf decides again in every run. Its decision matters if the sizes it returns
        are known for one answer only; whether something is 0 or 1 never is that.
        """
        expr = value.node.expr
        if not getattr(expr, "free_symbols", None):
            return
        if inside_leaf and not (isinstance(value, torch.SymBool) and self._is_open(expr)):
            return
        if isinstance(value, torch.SymBool):
            self._decisions[expr] = None
        else:
            self._decisions[sympy.Eq(expr, self._hint(expr))] = None

    def _is_open(self, expr: sympy.Basic) -> bool:
        """Say whether a condition can have either answer for sizes from 2 on."""
        larger = {
            s: sympy.Symbol(s.name, integer=True, nonnegative=True) + 2 for s in expr.free_symbols
        }
        found = plain(expr).subs(larger)
        if isinstance(found, sympy.core.relational.Relational):
            found = found.func(sympy.expand(found.lhs - found.rhs), 0)
        return found not in (sympy.true, sympy.false)

    def decisions(self) -> dict[sympy.Basic, None]:
        """Return what was decided so far."""
        return dict(self._decisions)

    def forget(self, before: Mapping[sympy.Basic, None]) -> None:
        """Go back to earlier decisions."""
        self._decisions = dict(before)

    def _hint(self, expr: sympy.Basic) -> sympy.Basic:
        return self.env.replace(expr).xreplace(known_sizes(self.env))

    def plain(self, expr: sympy.Basic) -> sympy.Basic:
        """Return an expression of the trace in our names, simplified by what was learnt."""
        if isinstance(expr, (bool, int, float)):
            return expr
        return plain(self.env.replace(expr), self._names)

    def plain_arguments(self, args: Args) -> object:
        """Return graph arguments with every size in our names."""
        return map_arguments(
            lambda leaf: self.plain(leaf) if isinstance(leaf, sympy.Basic) else leaf, args
        )

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor of the trace."""
        shape = tuple(
            self.plain(size.node.expr) if isinstance(size, torch.SymInt) else int(size)
            for size in tensor.shape
        )
        return TensorSpec(shape, tensor.dtype, tensor.requires_grad)

    def free(self) -> tuple[str, ...]:
        """Return the names of the sizes that may still vary."""
        found = {
            name for made in self._sizes.values() for name in _names_in(self.plain(made.node.expr))
        }
        return tuple(name for name in self._sizes if name in found)

    def hints(self) -> dict[str, int]:
        """Return the size that each symbol had in this trace."""
        return {
            name: int(known_sizes(self.env)[symbol])
            for symbol, ours in self._names.items()
            for name in _names_in(ours)
        }

    def place(self, name: str) -> Place | None:
        """Return where the model fixed a size, or made it follow from another."""
        found: Place | None = None
        current: object = next((s for s, ours in self._names.items() if ours == symbol(name)), None)
        settled = getattr(self.env, "settled", {})
        while current in settled:
            current, found = settled[current]
        return found

    def conditions(self, wanted: Iterable[sympy.Basic] = ()) -> tuple[sympy.Basic, ...]:
        """Return what the sizes must satisfy: for the graph to be right, and `wanted`."""
        ours = {ours: made for made, ours in self._names.items()}
        met = [guard.expr for guard in self.env.guards if isinstance(guard.expr, sympy.Eq)]
        met = [expr for expr in met if not expr.free_symbols & self._stand_ins]
        for expr in self._decisions:
            holds = bool(self.env.replace(expr).xreplace(known_sizes(self.env)))
            met.append(expr if holds else sympy.Not(expr))
        found = [self.plain(c.xreplace(ours)) for c in wanted]
        found += [part for expr in met for part in self._held(self.plain(expr))]
        return tuple(c for c in dict.fromkeys(found) if getattr(c, "free_symbols", None))

    def _held(self, condition: sympy.Basic) -> list[sympy.Basic]:
        """Return a condition; if fractions keep the example from meeting it, its sizes as such."""
        hints = self.hints()
        names = set() if isinstance(condition, bool) else free_names(condition)
        if not names or holds(condition, hints):
            return [condition]
        return [sympy.Eq(symbol(name), hints[name]) for name in sorted(names)]


def _names_in(expr: sympy.Basic) -> Iterable[str]:
    return [] if isinstance(expr, int) else [s.name for s in expr.free_symbols]


def exprs_in(value: object, env: ShapeEnv) -> list[sympy.Expr]:
    """Return every symbolic size in a nested value, once."""
    found: dict[sympy.Expr, None] = {}
    for _, leaf in walk(value):
        sizes: Iterable[object] = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                expr = env.replace(size.node.expr)
                if expr.free_symbols:
                    found[expr] = None
    return list(found)


def number_at(size: int | torch.SymInt, env: ShapeEnv, values: Values) -> int:
    """Return a size as a number, where some symbols have other values than in the example."""
    if isinstance(size, torch.SymInt):
        return int(env.replace(size.node.expr).xreplace({**known_sizes(env), **values}))
    return int(size)


def flat(size: Any) -> Any:
    """Return a size with one division where it has several: `(s//4 - 1)//2` is `(s - 4)//8`.

    That includes a size padded to whole windows: `s + (4 - s % 4) % 4` is `4*((s + 3)//4)`.
    What torch does with a size takes longer the deeper it is.
    """
    if not isinstance(size, torch.SymInt):
        return size
    node: Any = size.node
    expr = _flat(node.expr)
    return size if expr == node.expr else node.shape_env.create_symintnode(expr, hint=node.hint)


@functools.lru_cache(maxsize=4096)
def _flat(expr: sympy.Basic) -> sympy.Basic:
    if not expr.args:
        return expr
    args = [_flat(arg) for arg in expr.args]
    if _is_division(expr):
        rest, inner = args[0].as_coeff_Add()
        if _is_division(inner):
            base, divisor = inner.args
            return floor_div(base + divisor * rest, divisor * args[1])
    return _rounded(expr.func(*args))


def _rounded(total: sympy.Expr) -> sympy.Expr:
    """Return a sum; a number and the remainder that it leaves, or lacks, become a multiple."""
    for term in sympy.Add.make_args(total):
        factor, remainder = term.as_coeff_Mul()
        if type(remainder).__name__ not in _REMAINDERS:
            continue
        (dividend, divisor), up = remainder.args, bool(factor > 0)
        rest = sympy.expand((total - term) / abs(factor))
        inner = sympy.Integer(0)
        for part in sympy.Add.make_args(dividend):
            sign, value = part.as_coeff_Mul()
            is_inner = type(value).__name__ in _REMAINDERS and value.args[1] == divisor
            if not (part / divisor).is_Integer:
                inner += sign * value.args[0] if is_inner else part
        number = -inner if up else inner
        others = sympy.expand(rest - number)
        if others.free_symbols <= divisor.free_symbols:
            times = floor_div(number + divisor - 1 if up else number, divisor)
            return abs(factor) * (divisor * times + others)
    return total


_REMAINDERS = ("Mod", "PythonMod")


def _is_division(expr: sympy.Basic) -> bool:
    is_one = type(expr).__name__ == "FloorDiv"
    return is_one and bool(expr.args[1].is_Integer) and bool(expr.args[1] > 0)
