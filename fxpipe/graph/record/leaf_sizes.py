"""Keep what a leaf asks of sizes with the leaf.

A leaf decides by sizes in every run anew, so a decision is no condition on the inputs of the
model: Mamba pads to whole chunks, or loops over the tokens. Only what it needs is one, such as
the width of a linear layer.

In:  the arguments of a leaf, which gets stand-ins for their sizes (`hidden`); afterwards what it
     returned, and a way to run it at other sizes.
Out: its output in sizes of the model, and if it has decided something, the sizes of the output in
     terms of its own arguments': the stage compares them in each run.

What a leaf needs is found by running it where a condition that it met does not hold. If it
fails there, or if no formula fits its sizes, the condition is one of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard

import sympy
import torch

from fxpipe.graph.dims import plain, symbol
from fxpipe.graph.nested import SYMBOLIC, Args, Kwargs, Size, map_leaves, mutable_parts, walk
from fxpipe.graph.record.example_values import has_unbacked
from fxpipe.graph.sandbox.made_up import empty
from fxpipe.graph.sizes.symbols import Sizes, Values, number_at
from fxpipe.torch_inside import known_sizes

__all__ = ["OwnSizes", "StandIns", "numbers_in"]

Shapes = list[list[sympy.Expr]]
RunAt = Callable[[Args, Kwargs], object]


@dataclasses.dataclass(frozen=True, slots=True)
class OwnSizes:
    """The sizes of the tensors that a leaf returns, by those of its arguments.

    `sources` says which tensor among the arguments, and which dimension, a name stands for;
    numbers among the arguments count on after the tensors.
    """

    shapes: tuple[tuple[object, ...], ...]
    sources: Mapping[str, tuple[int, int]]


class StandIns:
    """The symbols that leaves of one trace get in place of the model's."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._made: dict[sympy.Expr, tuple[sympy.Symbol, torch.SymInt]] = {}
        self._model: dict[sympy.Symbol, sympy.Expr] = {}
        self._products: list[sympy.Expr] = []

    def hidden(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Return arguments of stand-in sizes; None if there is more to them than these."""
        inputs = (args, kwargs)
        parts = [part for part in mutable_parts(inputs) if part is not kwargs]
        if parts or _has_inexact(inputs) or has_unbacked(inputs, self._sizes.env):
            return None
        memo: dict[int, object] = {}
        numbers = [self._expr(number) for number in numbers_in(inputs)]

        def one(leaf: object) -> object:
            if isinstance(leaf, torch.SymInt):
                return self._stand_in(self._expr(leaf))
            if not _has_symbols(leaf):
                return leaf
            if id(leaf) not in memo:
                shape = [self._product(self._expr(size), numbers) for size in leaf.shape]
                memo[id(leaf)] = self._like(leaf, shape)
            return memo[id(leaf)]

        made: tuple[Args, Kwargs] = map_leaves(one, inputs)
        return made

    def _product(self, expr: sympy.Expr, numbers: Sequence[sympy.Expr]) -> Any:
        """Return a stand-in for a size; one that is a product of numbers stays one."""
        for number in () if isinstance(expr, (int, sympy.Integer)) else numbers:
            rest = expr / number
            if expr != number != 1 and rest.as_numer_denom()[1] == 1:
                found = self._product(rest, numbers) * self._stand_in(number)
                self._products.append(found.node.expr)
                return found
        return self._stand_in(expr)

    def _stand_in(self, expr: sympy.Expr) -> Any:
        if isinstance(expr, (int, sympy.Integer)):
            return int(expr)
        if expr not in self._made:
            hint = int(self._at(expr, {}))
            if hint < 2:  # ShapeEnv takes these for numbers
                return self._sizes.env.create_symintnode(expr, hint=hint)
            self._made[expr] = made, _ = self._sizes.stand_in(hint)
            self._model[made] = expr
        return self._made[expr][1]

    def _like(self, leaf: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor:
        """Return a tensor of another size, in the order in memory that this one has."""
        steps = [number_at(step, self._sizes.env, {}) for step in leaf.stride()]
        strides: list[Size] = [0] * len(shape)
        step: Size = 1
        for dim in sorted(range(len(shape)), key=lambda dim: (steps[dim], -dim)):
            if steps[dim]:
                strides[dim] = step
                step = step * shape[dim]
        return empty(shape, strides, leaf.dtype, leaf.device, leaf.requires_grad)

    def _expr(self, size: Any) -> sympy.Expr:
        """Return a size as an expression, or as an int if it is one."""
        expr = self._sizes.env.replace(size.node.expr) if isinstance(size, SYMBOLIC) else size
        return expr if getattr(expr, "free_symbols", None) else int(expr)

    def settled(
        self,
        output: object,
        met: Sequence[sympy.Basic],
        inputs: tuple[Args, Kwargs],
        used: Collection[int],
        run: RunAt,
    ) -> tuple[object, OwnSizes | None]:
        """Return the output in sizes of the model, and what to compare in each run, if anything.

        `met` are the conditions that the leaf has met, `used` are the positions of the tensors
        whose values it used. `run` runs it with other arguments.
        """
        env = self._sizes.env
        shapes = [[self._expr(size) for size in _sizes_of(leaf)] for _, leaf in walk(output)]
        met = [c for c in met if env.replace(c.xreplace(self._model)) != sympy.true]
        if not met:
            return self._in_model(output, shapes), None
        stood = [*(made for made, _ in self._made.values()), *self._products]
        self._made, self._products = {}, []  # some are numbers now
        symbols = {s for c in met for s in env.replace(c.xreplace(self._model)).free_symbols}
        ran = self._ran(output, symbols, inputs, run)
        needed = [c for c in met if all(self._holds(c, values) for values, _ in ran)]
        fitting = self._fitting(shapes, ran, stood)
        own = None if fitting is None else self._own(fitting, output, inputs, used)
        if own is None or fitting is None:
            needed, fitting, own = met, shapes, None
        for condition in needed:
            self._sizes.insist(condition, condition.xreplace(self._model))
        return self._in_model(output, fitting), own if len(needed) < len(met) else None

    def _holds(self, condition: sympy.Basic, values: Values) -> bool:
        return bool(self._at(condition.xreplace(self._model), values) == sympy.true)

    def _at(self, expr: object, values: Values) -> sympy.Basic:
        """Return an expression's value; not a number where it divides by zero."""
        if not isinstance(expr, sympy.Basic):
            return expr
        env = self._sizes.env
        try:
            return env.replace(expr).xreplace({**known_sizes(env), **values})
        except ZeroDivisionError:
            return sympy.nan

    def _ran(
        self,
        output: object,
        symbols: Collection[sympy.Symbol],
        inputs: tuple[Args, Kwargs],
        run: RunAt,
    ) -> list[tuple[Values, Shapes]]:
        """Run the leaf with one size changed at a time; return where it runs, and its sizes."""
        env = self._sizes.env
        kinds = _kinds(output)
        found: list[tuple[Values, Shapes]] = []
        for one in sorted(symbols & known_sizes(env).keys(), key=str):
            hint = int(known_sizes(env)[one])
            for value in (hint + 1, 2 * hint + 1, (hint + 1) // 2):
                values = {one: value}

                def resized(leaf: object, values: Values = values) -> object:
                    if isinstance(leaf, torch.SymInt):
                        return number_at(leaf, env, values)
                    if not _has_symbols(leaf):
                        return leaf
                    return self._like(leaf, [number_at(size, env, values) for size in leaf.shape])

                try:
                    args, kwargs = map_leaves(resized, inputs)
                    second = run(args, kwargs)
                except Exception:
                    continue
                if _kinds(second) == kinds:
                    sizes = [[*map(int, _sizes_of(leaf))] for _, leaf in walk(second)]
                    found.append((values, sizes))
        return found

    def _fitting(
        self, shapes: Shapes, ran: list[tuple[Values, Shapes]], stood: list[sympy.Expr]
    ) -> Shapes | None:
        """Return sizes that are right wherever the leaf ran; None if no formula is."""

        def fits(expr: object, first: int, there: list[int]) -> bool:
            model = expr.xreplace(self._model) if isinstance(expr, sympy.Basic) else expr
            found = [self._at(model, values) for values, _ in ran]
            return self._at(model, {}) == first and found == there

        made: Shapes = []
        for index, shape in enumerate(shapes):
            made.append([])
            for dim, known in enumerate(shape):
                model = known.xreplace(self._model) if isinstance(known, sympy.Basic) else known
                first = int(self._at(model, {}))
                there = [sizes[index][dim] for _, sizes in ran]
                expr = next((e for e in (known, *stood) if fits(e, first, there)), None)
                if expr is None:
                    return None
                made[-1].append(expr)
        return made

    def _own(
        self, shapes: Shapes, output: object, inputs: object, used: Collection[int]
    ) -> OwnSizes | None:
        """Return sizes in terms of the arguments that the leaf uses; None if they do not tell."""
        tensors = [leaf for _, leaf in walk(inputs) if isinstance(leaf, torch.Tensor)]
        sources: dict[object, tuple[int, int]] = {}
        for position in used:
            for dim, size in enumerate(tensors[position].shape):
                sources.setdefault(self._expr(size), (position, dim))
        for position, number in enumerate(numbers_in(inputs), len(tensors)):
            sources.setdefault(self._expr(number), (position, 0))
        wanted = {
            s for shape in shapes for e in shape if not isinstance(e, int) for s in e.free_symbols
        }
        is_number = any(isinstance(leaf, SYMBOLIC) for _, leaf in walk(output))
        if is_number or any(self._model.get(s) not in sources for s in wanted):
            return None
        names = {s: symbol(f"size_{index}") for index, s in enumerate(sorted(wanted, key=str))}
        leaves = [leaf for _, leaf in walk(output)]
        return OwnSizes(
            tuple(
                tuple(plain(size, names) for size in shape)
                for leaf, shape in zip(leaves, shapes, strict=True)
                if isinstance(leaf, torch.Tensor)
            ),
            {names[s].name: sources[self._model[s]] for s in wanted},
        )

    def _in_model(self, output: object, shapes: Shapes) -> object:
        """Return an output with sizes of the model in place of stand-ins."""
        env, remaining = self._sizes.env, iter(shapes)

        def size(expr: sympy.Basic) -> Size:
            model = env.replace(expr.xreplace(self._model)) if not isinstance(expr, int) else expr
            if isinstance(model, int) or not model.free_symbols:
                return int(model)
            return env.create_symintnode(model, hint=int(self._at(model, {})))

        def one(leaf: Any) -> object:
            shape = [size(expr) for expr in next(remaining)]
            if isinstance(leaf, torch.SymInt):
                return shape[0]
            if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
                return self._inexact(leaf)
            if not _has_symbols(leaf) and not any(isinstance(part, torch.SymInt) for part in shape):
                return leaf
            return self._like(leaf, shape)

        return map_leaves(one, output)

    def _inexact(self, value: torch.SymFloat | torch.SymBool) -> object:
        """Return a fraction or an answer that a leaf has computed of sizes, in the model's."""
        env = self._sizes.env
        expr = env.replace(value.node.expr.xreplace(self._model))
        if isinstance(value, torch.SymBool):
            return env.create_symboolnode(expr) if expr.free_symbols else bool(expr)
        hint = float(self._at(expr, {}))
        return env.create_symfloatnode(expr, hint=hint) if expr.free_symbols else hint


def numbers_in(value: object) -> list[torch.SymInt]:
    """Return the sizes that are numbers of their own in a value."""
    return [leaf for _, leaf in walk(value) if isinstance(leaf, torch.SymInt)]


def _has_inexact(value: object) -> bool:
    """Say whether a symbolic number that is no size is in a value."""
    leaves = (leaf for _, leaf in walk(value))
    return any(isinstance(leaf, SYMBOLIC) and not isinstance(leaf, torch.SymInt) for leaf in leaves)


def _has_symbols(leaf: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return any(isinstance(size, torch.SymInt) for size in leaf.shape)


def _sizes_of(leaf: object) -> Sequence[Size]:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape)
    return (leaf,) if isinstance(leaf, torch.SymInt) else ()


def _kinds(output: object) -> list[object]:
    """Describe everything of an output but the sizes of tensors."""
    return [
        (path, leaf.dim(), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else (path, leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf))
        for path, leaf in walk(output)
    ]
