"""Make tensors up, without data or with values that mean nothing, and run modules on them.

One that requires a gradient has a history, as if computed, so that code may change it in place.

`run_real` is the last resort for code that cannot run on fake tensors because it looks at
values: it runs on made-up real ones. All state is saved and restored. If the sizes of the
arguments are symbolic, the module runs once more at other sizes: a size of the output is a
number, a size of the arguments, a product of two, or one of these and a number more, whichever
fits both runs. A symbol for which none does becomes a number for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import nn

from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import Size, map_leaves, walk
from fxpipe.graph.sandbox.restore import preserved_values
from fxpipe.graph.sizes.symbols import Values, exprs_in, number_at
from fxpipe.torch_inside import FakeTensor, FakeTensorMode, known_sizes

__all__ = ["another", "empty", "filled", "grown", "run_real"]


def empty(
    shape: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    """Return a new tensor, a fake one inside a fake mode."""
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
        ctx: object,
        anchor: torch.Tensor,
        shape: Sequence[Size],
        stride: Sequence[Size],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> object:
        return None, None, None, None


def another(leaf: object, shape: Sequence[Size] | None = None) -> Any:
    """Return an empty tensor like this one, or of another size; anything else as it is.

    Of another size it is dense, in the order of the given one; what was expanded stays so.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    stride = leaf.stride() if shape is None else _strides(leaf, shape)
    device = torch.device("cpu") if leaf.is_meta else leaf.device
    return empty(shape or leaf.shape, stride, leaf.dtype, device, leaf.requires_grad)


def _strides(leaf: torch.Tensor, shape: Sequence[Size]) -> list[Size]:
    strides: list[Size] = [0] * len(shape)
    step: Size = 1
    order = sorted(range(len(shape)), key=lambda dim: (leaf.stride(dim), -dim))
    for dim in order:
        if leaf.stride(dim) != 0 or leaf.shape[dim] == 1:
            strides[dim] = step
            step = step * shape[dim]
    return strides


def filled(
    spec: torch.Tensor | TensorSpec,
    shape: Sequence[int],
    device: torch.device,
    *,
    with_ones: bool = False,
) -> torch.Tensor:
    """Return a real tensor: random numbers, zeros for integers, True; or other values: ones, False.

    Integers and flags may be indices and masks. Those of the two kinds differ everywhere.
    """
    dtype = spec.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full(shape, with_ones is not (dtype == torch.bool), dtype=dtype, device=device)
    if with_ones:
        made = torch.ones(shape, dtype=dtype, device=device)
    else:
        made = torch.randn(shape, dtype=torch.float32, device=device).to(dtype)
    return grown(made) if spec.requires_grad else made


def grown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one that has a history."""
    return tensor.requires_grad_(True) * 1


# Example sizes times these: divisibility is kept, and different symbols stay different.
_FACTORS = (3, 2, 5, 7)


def run_real(
    mode: FakeTensorMode,
    module: nn.Module,
    call: Callable[..., object],
    args: object,
    kwargs: object,
    failure: BaseException,
) -> object:
    """Return the outputs of a module as fake tensors.

    Raises:
        the given failure: the module fails on real tensors as well.
    """
    with preserved_values(module):
        runs = _Runs(mode, call, (args, kwargs), failure)
        free = runs.symbols
        found = runs.output(free)
        if found is None:  # find sizes that may change together, the batch first
            free = []
            for symbol in runs.symbols:
                if runs.output([*free, symbol]) is not None:
                    free.append(symbol)
            runs.fix(free)
            found = runs.output(free)
    assert found is not None
    return found


class _Runs:
    """Runs of one call at several sizes."""

    def __init__(
        self,
        mode: FakeTensorMode,
        call: Callable[..., object],
        inputs: object,
        failure: BaseException,
    ) -> None:
        assert mode.shape_env is not None
        self._mode, self._env = mode, mode.shape_env
        self._call, self._inputs = call, inputs
        self._exprs = exprs_in(inputs, self._env)
        used = {symbol for expr in self._exprs for symbol in expr.free_symbols}
        known = known_sizes(self._env)
        if not used <= known.keys():
            raise failure
        self.symbols = [symbol for symbol in known if symbol in used]
        self._hints: Values = {symbol: int(known[symbol]) for symbol in self.symbols}
        try:
            self._first = self._run(self._hints)
        except Exception as error:
            raise failure from error

    def fix(self, free: Sequence[sympy.Symbol]) -> None:
        """Make numbers of all symbols but these."""
        for symbol in self.symbols:
            if symbol not in free:
                self._env.evaluate_expr(sympy.Eq(symbol, self._hints[symbol]))

    def output(self, free: Sequence[sympy.Symbol]) -> object:
        """Return the output with sizes in terms of some symbols; None if they do not tell."""
        others = {**self._hints, **_other_sizes(free, self._hints)}
        try:
            second = self._run(others) if free else self._first
        except Exception:
            return None
        pairs = list(zip(walk(self._first), walk(second), strict=False))
        same = len(pairs) == len(list(walk(second))) == len(list(walk(self._first)))
        if not same or not all(map(_is_alike, pairs)):
            return None
        products = [a * b for a, b in itertools.combinations_with_replacement(free, 2)]
        sizes = [*free, *(e for e in self._exprs if e.free_symbols <= {*free}), *products]
        shapes = []
        for (_, a), (_, b) in pairs:
            shapes_of = [t.shape for t in (a, b) if isinstance(t, torch.Tensor)]
            dims = zip(*shapes_of, strict=True)
            found = [self._size(int(m), int(n), sizes, others) for m, n in dims]
            shapes.append([size for size in found if size is not None])
            if len(shapes[-1]) < len(found):
                return None
        remaining = iter(shapes)
        with self._mode:
            return map_leaves(lambda leaf: another(leaf, next(remaining)), self._first)

    def _size(
        self, first: int, second: int, exprs: Sequence[sympy.Expr], others: Values
    ) -> Size | None:
        if first == second:
            return first
        known = [(expr, _at(expr, self._hints), _at(expr, others)) for expr in exprs]
        exact = [expr for expr, a, b in known if (a, b) == (first, second)]
        shifted = [expr + first - a for expr, a, b in known if b - a == second - first]
        for expr in (*exact, *shifted):
            return self._env.create_symintnode(expr, hint=first)
        return None

    def _run(self, values: Values) -> object:
        memo: dict[int, torch.Tensor] = {}

        def real(leaf: object) -> object:
            if isinstance(leaf, torch.SymInt):
                return number_at(leaf, self._env, values)
            if not isinstance(leaf, FakeTensor):
                return leaf
            if id(leaf) not in memo:
                shape = [number_at(size, self._env, values) for size in leaf.shape]
                memo[id(leaf)] = filled(leaf, shape, leaf.device)
            return memo[id(leaf)]

        args, kwargs = map_leaves(real, self._inputs)
        return self._call(*args, **kwargs)


def _at(expr: sympy.Basic, values: Values) -> int:
    return int(expr.xreplace(dict(values)))


def _other_sizes(free: Sequence[sympy.Symbol], hints: Values) -> Values:
    """Return another size for every symbol, no two alike."""
    found: dict[sympy.Symbol, int] = {}
    for symbol, factor in zip(free, itertools.cycle(_FACTORS), strict=False):
        size = hints[symbol] * factor
        while size in found.values():
            size += hints[symbol]
        found[symbol] = size
    return found


def _is_alike(pair: tuple[tuple[object, object], tuple[object, object]]) -> bool:
    (path, a), (other_path, b) = pair
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return path == other_path and (a.dim(), a.dtype) == (b.dim(), b.dtype)
    is_number = isinstance(a, (int, float))  # one that depends on the sizes cannot be told
    return path == other_path and type(a) is type(b) and (not is_number or bool(a == b))
