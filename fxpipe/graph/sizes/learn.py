"""Write output sizes in terms of input sizes, from runs at a few sets of sizes.

For what cannot be followed with symbols: functions such as poolings, for which torch
insists on sizes that do not matter to them, and code that runs on made-up real tensors
because it looks at values. It runs at the example sizes and once more with every symbol
at another size. An output dimension is then a number, an input size or a product of two,
whichever fits both runs. For a dimension that fits none of these more runs decide between
rules like `s//2`, each at the sizes for which the rules that are left disagree most; if
none is left, `learn_sizes` gives up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe.graph.nested import map_leaves, walk
from fxpipe.graph.sizes.rules import SizeRule, find_rules, halving_size, most_telling
from fxpipe.torch_inside import FakeTensorMode, floor_div, known_sizes

__all__ = [
    "Values",
    "empty",
    "exprs_in",
    "fake_like",
    "grown",
    "hints_of",
    "learn_sizes",
    "number_at",
]

Values = Mapping[sympy.Symbol, int]
# Example sizes times these: divisibility is kept, and different symbols stay different.
_FACTORS = (3, 2, 5, 7)
# Further runs that tell rules apart: example sizes plus these (large ones for audio), or,
# for code that insists on divisible sizes, times those.
_STEPS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 21, 29, 34, 47, 64, 96, 160, 233, 377)
_TIMES = (2, 3, 4, 5, 6, 7, 9, 11)
_FAR = 2048
_MOST_RUNS = 16
_SOME = 48


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
    if not symbols <= known_sizes(env).keys():
        return None
    return {s: int(known_sizes(env)[s]) for s in sorted(symbols, key=lambda s: s.name)}


def number_at(size: Any, env: ShapeEnv, values: Values) -> int:
    """Return a size of an argument as a number."""
    if isinstance(size, torch.SymInt):
        # Strides may depend on more symbols than the sizes that are varied.
        return int(env.replace(size.node.expr).xreplace({**known_sizes(env), **values}))
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
    learner = _Learner(mode, hints, known)
    if not learner.add(hints, run_at(hints)):
        return []
    if hints and not learner.attempt(other_sizes(hints), run_at):
        return []
    for _ in range(_MOST_RUNS):
        sizes = learner.telling_sizes()
        if sizes is None:
            break
        learner.attempt(sizes, run_at)
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
    """Keeps, for each output dimension, the sizes in all runs so far."""

    def __init__(self, mode: FakeTensorMode, hints: Values, known: Iterable[Any]) -> None:
        self._mode = mode
        self._hints = hints
        symbols = list(hints)
        mine = [expr for expr in known if expr.free_symbols <= hints.keys()]
        self._bases: list[Any] = list(dict.fromkeys((*symbols, *mine)))
        products = [a * b for a, b in itertools.combinations_with_replacement(symbols, 2)]
        self._exprs: list[Any] = list(dict.fromkeys((*self._bases, *products)))
        self._at: list[list[int]] = [[] for _ in self._exprs]  # their values in all runs
        self._outputs: list[Any] = []
        self._leaves: list[list[Any]] = []
        self._tried: set[int] = set()
        self._halved: list[Values] = []
        self._pools: dict[frozenset[sympy.Symbol], tuple[list[Values], list[list[int]]]] = {}

    def attempt(self, values: Values, run_at: Callable[[Values], Any]) -> bool:
        """Add a run; False if the module does not take these sizes."""
        try:
            output = run_at(values)
        except Exception:
            return False
        return self.add(values, output)

    def add(self, values: Values, output: Any) -> bool:
        """Add what came out of a run; False if it does not compare."""
        leaves = list(walk(output))
        if any(_has_symbols(leaf) for _, leaf in leaves):
            return False
        if self._leaves and not _alike(self._leaves[0], leaves):
            return False
        self._outputs.append(output)
        self._leaves.append(leaves)
        for expr, found in zip(self._exprs, self._at, strict=True):
            found.append(_value(expr, values))
        return True

    def telling_sizes(self) -> Values | None:
        """Return the sizes at which a run tells most; None if all is clear, or hopeless."""
        candidates = [
            self._rules(sizes)
            for shape in self._shapes()
            for sizes in shape
            if self._simple(sizes) is None
        ]
        if not candidates or not all(candidates):
            return None
        used = frozenset(
            symbol
            for rules in candidates
            for rule in rules
            for symbol in self._bases[rule.base].free_symbols
        )
        pool, bases = self._pool(used)
        untried = [run for run in range(len(pool)) if run not in self._tried]
        simplest = [rules[:_SOME] for rules in candidates]  # enough to choose by, at first
        run = most_telling(simplest, bases, untried)
        if run is None:
            run = most_telling(candidates, bases, untried)
        if run is None:
            return self._halving(candidates)
        self._tried.add(run)
        return pool[run]

    def _halving(self, candidates: Iterable[Sequence[SizeRule]]) -> Values | None:
        """Return sizes that halve the shifts which the best rule of each dimension leaves."""
        values = dict(self._hints)
        for rules in candidates:
            base = self._bases[rules[0].base]
            if len(base.free_symbols) != 1:
                continue
            (symbol,) = base.free_symbols
            first = self._hints[symbol]
            sizes = ((size, _value(base, {symbol: size})) for size in range(first, first + _FAR))
            if values[symbol] == first:
                values[symbol] = halving_size(rules, sizes) or first
        if values == self._hints or values in self._halved:
            return None
        self._halved.append(values)
        return values

    def _pool(self, used: frozenset[sympy.Symbol]) -> tuple[list[Values], list[list[int]]]:
        """Return sets of sizes, only those in use changed, and the bases at each of them."""
        if used not in self._pools:
            pool: list[Values] = []
            varied = [symbol for symbol in self._hints if symbol in used]
            for run in range(len(_STEPS) + len(_TIMES)):
                values = dict(self._hints)
                for index, symbol in enumerate(varied):
                    if run < len(_STEPS):
                        values[symbol] += _STEPS[(run + 3 * index) % len(_STEPS)]
                    else:
                        values[symbol] *= _TIMES[(run + 3 * index) % len(_TIMES)]
                pool.append(values)
            bases = [[_value(base, values) for values in pool] for base in self._bases]
            self._pools[used] = (pool, bases)
        return self._pools[used]

    def result(self) -> list[Any]:
        shapes = []
        for shape in self._shapes():
            found = [self._fit(sizes) for sizes in shape]
            if any(size is None for size in found):
                return []
            shapes.append(found)
        remaining = iter(shapes)

        def fake(leaf: Any) -> Any:
            shape = next(remaining)
            return fake_like(leaf, shape) if isinstance(leaf, torch.Tensor) else leaf

        with self._mode:
            return [map_leaves(fake, self._outputs[0])]

    def _shapes(self) -> Iterator[list[list[int]]]:
        """Yield for each leaf, for each of its dimensions, the sizes in all runs."""
        for leaves in zip(*self._leaves, strict=True):
            tensors = [leaf for _, leaf in leaves]
            is_tensor = isinstance(tensors[0], torch.Tensor)
            dims = range(tensors[0].dim()) if is_tensor else range(0)
            yield [[int(tensor.shape[dim]) for tensor in tensors] for dim in dims]

    def _fit(self, sizes: Sequence[int]) -> Any:
        expr = self._simple(sizes)
        if expr is None:
            rules = self._rules(sizes)
            expr = _expression(rules[0], self._bases) if rules else None
        if expr is None or isinstance(expr, int):
            return expr
        env = self._mode.shape_env
        assert env is not None
        return env.create_symintnode(expr, hint=sizes[0])

    def _simple(self, sizes: Sequence[int]) -> Any:
        if all(size == sizes[0] for size in sizes):
            return sizes[0]
        return next((e for e, at in zip(self._exprs, self._at, strict=True) if at == sizes), None)

    def _rules(self, sizes: Sequence[int]) -> list[SizeRule]:
        return find_rules(self._at[: len(self._bases)], sizes)


def _value(expr: Any, values: Values) -> int:
    return values[expr] if expr in values else int(expr.xreplace(dict(values)))


def _has_symbols(leaf: Any) -> bool:
    sizes = leaf.shape if isinstance(leaf, torch.Tensor) else ()
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _expression(rule: SizeRule, bases: Sequence[Any]) -> Any:
    whole = bases[rule.base] + rule.shift
    divided = floor_div(whole, rule.divisor) if rule.divisor > 1 else whole
    return rule.factor * divided + rule.offset


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


def fake_like(leaf: torch.Tensor, shape: list[Any]) -> torch.Tensor:
    """Return a fake tensor like this one, of another size."""
    device = torch.device("cpu") if leaf.is_meta else leaf.device
    return empty(shape, _strides(leaf, shape), leaf.dtype, device, leaf.requires_grad)


def empty(
    shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> torch.Tensor:
    """Return a new tensor; one that requires a gradient has a history, as if computed."""
    if not requires_grad:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    with torch.enable_grad():
        anchor = torch.empty((), device=device, requires_grad=True)
        computed: Any = _Computed.apply
        made: torch.Tensor = computed(anchor, shape, stride, dtype)
        return made


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, shape: Any, stride: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, None


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
