"""Learn what a module returns by running it on made-up real tensors.

The last resort for code that cannot run on fake tensors because it looks at
values. All state is saved and restored. If the sizes of the arguments are symbolic,
the module runs once more for each symbol with another size, and the sizes of the
outputs are written in terms of the symbols; a symbol that the module does not let
change becomes a number for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe.graph.preserve import preserved_values
from fxpipe.graph.structure import map_leaves, walk

__all__ = ["grown", "run_real"]

Values = Mapping[sympy.Symbol, int]


def run_real(
    mode: FakeTensorMode,
    module: nn.Module,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    failure: BaseException,
) -> Any:
    """Return the outputs of a module as fake tensors.

    Raises:
        the given failure: the module fails on real tensors as well.
    """
    env = mode.shape_env
    assert env is not None
    exprs = _exprs((args, kwargs), env)
    hints = {s: int(env.backed_var_to_val[s]) for s in _symbols(exprs)}
    with preserved_values(module):
        try:
            first = _run(call, args, kwargs, env, hints)
        except Exception as error:
            raise failure from error
        runs = [(hints, first)]
        for symbol in hints:
            other = _other_run(call, args, kwargs, env, hints, symbol)
            if other is None or not _same_structure(first, other[1]):
                _insist(env, symbol, hints[symbol])
            else:
                runs.append(other)
    known = [expr for expr in _exprs((args, kwargs), env) if not isinstance(expr, int)]
    return _as_fakes(mode, runs, known)


def grown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one that has a history, so code may change it in place."""
    return tensor.requires_grad_(True) * 1


def _exprs(value: Any, env: ShapeEnv) -> list[Any]:
    """Return every size in the arguments."""
    found: dict[Any, None] = {}
    for _, leaf in walk(value):
        sizes: Iterable[Any] = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                found[env.replace(size.node.expr)] = None
    return list(found)


def _symbols(exprs: list[Any]) -> list[sympy.Symbol]:
    found = {symbol for expr in exprs for symbol in expr.free_symbols}
    return sorted(found, key=lambda symbol: symbol.name)


def _run(call: Callable[..., Any], args: Any, kwargs: Any, env: ShapeEnv, values: Values) -> Any:
    memo: dict[int, torch.Tensor] = {}

    def number(size: Any) -> int:
        if isinstance(size, torch.SymInt):
            return int(env.replace(size.node.expr).xreplace(dict(values)))
        return int(size)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return number(leaf)
        if isinstance(leaf, FakeTensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = _made_up(leaf, [number(size) for size in leaf.shape])
            return memo[id(leaf)]
        return leaf

    return call(*map_leaves(real, args), **map_leaves(real, kwargs))


def _other_run(
    call: Callable[..., Any], args: Any, kwargs: Any, env: ShapeEnv, hints: Values, symbol: Any
) -> tuple[Values, Any] | None:
    for size in (hints[symbol] + 1, 2 * hints[symbol], 3 * hints[symbol]):
        values = {**hints, symbol: size}
        try:
            return values, _run(call, args, kwargs, env, values)
        except Exception:
            continue
    return None


def _same_structure(left: Any, right: Any) -> bool:
    ours, theirs = list(walk(left)), list(walk(right))
    return [path for path, _ in ours] == [path for path, _ in theirs] and all(
        not isinstance(a, torch.Tensor) or (isinstance(b, torch.Tensor) and a.dim() == b.dim())
        for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


def _insist(env: ShapeEnv, symbol: sympy.Symbol, value: int) -> None:
    """Make a symbol a number in everything that follows."""
    env.evaluate_expr(sympy.Eq(symbol, value))


def _as_fakes(mode: FakeTensorMode, runs: list[tuple[Values, Any]], known: list[Any]) -> Any:
    outputs = [[leaf for _, leaf in walk(output)] for _, output in runs]
    position = iter(range(len(outputs[0])))

    def fake(leaf: Any) -> Any:
        index = next(position)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = [
            _size(
                mode,
                [
                    (values, int(found[index].shape[dim]))
                    for (values, _), found in zip(runs, outputs, strict=True)
                ],
                known,
            )
            for dim in range(leaf.dim())
        ]
        device = torch.device("cpu") if leaf.is_meta else leaf.device
        made = torch.empty(shape, dtype=leaf.dtype, device=device)
        return grown(made) if leaf.requires_grad else made

    with mode:
        return map_leaves(fake, runs[0][1])


def _size(mode: FakeTensorMode, seen: list[tuple[Values, int]], known: list[Any]) -> Any:
    """Return an output size as a number or in terms of the symbols."""
    first = seen[0][1]
    if all(size == first for _, size in seen):
        return first
    symbols = list(seen[0][0])
    products = [a * b for i, a in enumerate(symbols) for b in symbols[i:]]
    for expr in (*symbols, *known, *products, _linear(seen, symbols)):
        if expr is not None and all(expr.xreplace(dict(v)) == size for v, size in seen):
            env = mode.shape_env
            assert env is not None
            return env.create_symintnode(expr, hint=first)
    return first


def _linear(seen: list[tuple[Values, int]], symbols: list[Any]) -> Any:
    base_values, base = seen[0]
    expr: Any = sympy.Integer(base)
    for values, size in seen[1:]:
        for symbol in symbols:
            step = values[symbol] - base_values[symbol]
            if step:
                if (size - base) % step:
                    return None
                expr += ((size - base) // step) * (symbol - base_values[symbol])
    return expr


def _made_up(fake: FakeTensor, shape: list[int]) -> torch.Tensor:
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        made = torch.randn(shape, dtype=torch.float32, device=fake.device).to(fake.dtype)
        return grown(made) if fake.requires_grad else made
    if fake.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool, device=fake.device)
    return torch.zeros(shape, dtype=fake.dtype, device=fake.device)
