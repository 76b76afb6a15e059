"""Write output sizes in terms of input sizes, from runs at a few sets of sizes.

A leaf is opaque: nobody needs to follow symbols through it, which is slow and makes
torch insist on sizes that the leaf does not care about. It is run at the example
sizes and once more with every symbol at another size. An output dimension is then
a number, an input size or a product of two, whichever fits both runs. For a
dimension that fits none of these (a convolution's, say) more runs decide between
formulas like `s//2`; if none is left, `learn_sizes` gives up and the caller has to
follow the symbols after all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from fxpipe.graph.structure import map_leaves, walk

__all__ = ["Values", "exprs_in", "grown", "hints_of", "learn_sizes", "number_at"]

Values = Mapping[sympy.Symbol, int]
# Example sizes times these: divisibility is kept, and different symbols stay different.
_FACTORS = (3, 2, 5, 7)
# Further runs that tell formulas apart: example sizes plus these.
_STEPS = (1, 2, 3, 5)
_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 14, 16, 32, 64, 160, 320)


def exprs_in(value: Any, env: ShapeEnv) -> list[Any]:
    """Return every symbolic size in a nested value, once."""
    found: dict[Any, None] = {}
    for _, leaf in walk(value):
        sizes: Iterable[Any] = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                expr = env.replace(size.node.expr)
                if expr.free_symbols:
                    found[expr] = None
    return list(found)


def hints_of(exprs: Iterable[Any], env: ShapeEnv) -> dict[sympy.Symbol, int] | None:
    """Return the example value of each symbol; None if one comes from data."""
    symbols = {symbol for expr in exprs for symbol in expr.free_symbols}
    if not symbols <= env.backed_var_to_val.keys():
        return None
    return {s: int(env.backed_var_to_val[s]) for s in sorted(symbols, key=lambda s: s.name)}


def number_at(size: Any, env: ShapeEnv, values: Values) -> int:
    """Return a size of an argument as a number."""
    if isinstance(size, torch.SymInt):
        return int(env.replace(size.node.expr).xreplace(dict(values)))
    return int(size)


def grown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one that has a history, so code may change it in place."""
    return tensor.requires_grad_(True) * 1


def learn_sizes(
    mode: FakeTensorMode, hints: Values, known: Iterable[Any], run_at: Callable[[Values], Any]
) -> list[Any]:
    """Return the output of `run_at` as fake tensors with symbolic sizes.

    In a list, which is empty if the sizes cannot be told. `known` are the sizes of the
    arguments. An exception of the run at the example sizes is the caller's.
    """
    learner = _Learner(mode, known)
    learner.add(hints, run_at(hints))
    if not hints:
        return learner.result()
    if not learner.attempt(other_sizes(hints), run_at):
        return []
    for step in _STEPS:
        if not learner.is_ambiguous:
            break
        learner.attempt({symbol: size + step for symbol, size in hints.items()}, run_at)
    return learner.result()


def other_sizes(hints: Values) -> dict[sympy.Symbol, int]:
    """Return another size for every symbol, no two alike."""
    found: dict[sympy.Symbol, int] = {}
    for index, (symbol, hint) in enumerate(hints.items()):
        size = hint * _FACTORS[index % len(_FACTORS)]
        while size in found.values():
            size += hint
        found[symbol] = size
    return found


class _Learner:
    """Keeps, for each output dimension, the formulas that fit all runs so far."""

    def __init__(self, mode: FakeTensorMode, known: Iterable[Any]) -> None:
        self._mode = mode
        self._known = list(known)
        self._runs: list[Values] = []
        self._outputs: list[Any] = []
        self._leaves: list[list[Any]] = []
        self.is_ambiguous = False

    def attempt(self, values: Values, run_at: Callable[[Values], Any]) -> bool:
        """Add a run; False if the module does not take these sizes."""
        try:
            output = run_at(values)
        except Exception:
            return False
        return self.add(values, output)

    def add(self, values: Values, output: Any) -> bool:
        leaves = list(walk(output))
        if self._leaves and not _alike(self._leaves[0], leaves):
            return False
        self._runs.append(values)
        self._outputs.append(output)
        self._leaves.append(leaves)
        self.is_ambiguous = any(
            self._simple(sizes) is None for shape in self._shapes() for sizes in shape
        )
        return True

    def result(self) -> list[Any]:
        shapes = []
        for shape in self._shapes():
            if any(isinstance(size, torch.SymInt) for sizes in shape for size in sizes):
                return []
            found = [self._fit(sizes) for sizes in shape]
            if any(size is None for size in found):
                return []
            shapes.append(found)
        remaining = iter(shapes)

        def fake(leaf: Any) -> Any:
            shape = next(remaining)
            return _made(leaf, shape) if isinstance(leaf, torch.Tensor) else leaf

        with self._mode:
            return [map_leaves(fake, self._outputs[0])]

    def _shapes(self) -> Iterator[list[list[Any]]]:
        """Yield for each leaf, for each of its dimensions, the sizes in all runs."""
        for leaves in zip(*self._leaves, strict=True):
            tensors = [leaf for _, leaf in leaves]
            is_tensor = isinstance(tensors[0], torch.Tensor)
            dims = range(tensors[0].dim()) if is_tensor else range(0)
            yield [[tensor.shape[dim] for tensor in tensors] for dim in dims]

    def _fit(self, sizes: Sequence[int]) -> Any:
        expr = self._simple(sizes)
        if expr is None and len(sizes) > 3:
            expr = next((e for e in self._formulas(sizes) if self._fits(e, sizes)), None)
        if expr is None or isinstance(expr, int):
            return expr
        env = self._mode.shape_env
        assert env is not None
        return env.create_symintnode(expr, hint=int(sizes[0]))

    def _simple(self, sizes: Sequence[int]) -> Any:
        if all(size == sizes[0] for size in sizes):
            return int(sizes[0])
        symbols = list(self._runs[0])
        products = [a * b for a, b in itertools.combinations_with_replacement(symbols, 2)]
        for expr in (*symbols, *self._known, *products):
            if self._fits(expr, sizes):
                return expr
        return None

    def _formulas(self, sizes: Sequence[int]) -> Iterator[Any]:
        for base in (*self._runs[0], *self._known):
            at = [int(base.xreplace(dict(values))) for values in self._runs[:2]]
            if at[0] == at[1]:
                continue
            slope, rest = divmod(int(sizes[1]) - int(sizes[0]), at[1] - at[0])
            if not rest:
                yield slope * base + int(sizes[0]) - slope * at[0]
            for divisor in _DIVISORS:
                for shift in range(-divisor, divisor):
                    yield FloorDiv(base + shift, divisor)
                    yield FloorDiv(base + shift, divisor) + 1

    def _fits(self, expr: Any, sizes: Sequence[int]) -> bool:
        return all(
            expr.xreplace(dict(values)) == size
            for values, size in zip(self._runs, sizes, strict=True)
        )


def _alike(left: list[Any], right: list[Any]) -> bool:
    if [path for path, _ in left] != [path for path, _ in right]:
        return False
    for (_, a), (_, b) in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            if not isinstance(b, torch.Tensor) or a.dim() != b.dim() or a.dtype != b.dtype:
                return False
        elif isinstance(a, (int, float)) and a != b:
            return False  # a number that depends on the sizes
    return True


def _made(leaf: torch.Tensor, shape: list[Any]) -> torch.Tensor:
    device = torch.device("cpu") if leaf.is_meta else leaf.device
    made = torch.empty_strided(shape, _strides(leaf, shape), dtype=leaf.dtype, device=device)
    return grown(made) if leaf.requires_grad else made


def _strides(leaf: torch.Tensor, shape: list[Any]) -> list[Any]:
    """Return dense strides in the order of the example's; what was expanded stays so."""
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    order = sorted(range(len(shape)), key=lambda dim: (leaf.stride(dim), -dim))
    for dim in order:
        if leaf.stride(dim) != 0 or leaf.shape[dim] == 1:
            strides[dim] = step
            step = step * shape[dim]
    return strides
