"""Learn what a module returns by running it on made-up real tensors.

The last resort for code that cannot run on fake tensors because it looks at
values. All state is saved and restored. If the sizes of the arguments are symbolic,
the module runs at other sizes as well, and the sizes of the outputs are written in
terms of the symbols; a symbol that the module does not let change becomes a number
for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe.graph.nested import map_leaves
from fxpipe.graph.sandbox.restore import preserved_values
from fxpipe.graph.sizes.learn import Values, exprs_in, grown, hints_of, learn_sizes, number_at
from fxpipe.torch_inside import FakeTensor, FakeTensorMode, known_sizes

__all__ = ["run_real"]


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
    known = exprs_in((args, kwargs), env)
    hints = hints_of(known, env)
    if hints is None:
        raise failure

    def run_at(values: Values) -> Any:
        return _run(call, args, kwargs, env, {**hints, **values})

    with preserved_values(module):
        try:
            run_at(hints)
        except Exception as error:
            raise failure from error
        found = learn_sizes(mode, hints, known, run_at)
        if found:
            return found[0]
        # Not all at once, then: find sizes that may change together, the batch first.
        free: dict[sympy.Symbol, int] = {}
        for symbol in (s for s in known_sizes(env) if s in hints):
            wanted = {**free, symbol: hints[symbol]}
            if learn_sizes(mode, wanted, known, run_at):
                free = wanted
        for symbol in hints.keys() - free.keys():
            env.evaluate_expr(sympy.Eq(symbol, hints[symbol]))
        found = learn_sizes(mode, free, exprs_in((args, kwargs), env), run_at)
    if not found:
        raise failure
    return found[0]


def _run(call: Callable[..., Any], args: Any, kwargs: Any, env: ShapeEnv, values: Values) -> Any:
    memo: dict[int, torch.Tensor] = {}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return number_at(leaf, env, values)
        if isinstance(leaf, FakeTensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = _made_up(leaf, [number_at(s, env, values) for s in leaf.shape])
            return memo[id(leaf)]
        return leaf

    return call(*map_leaves(real, args), **map_leaves(real, kwargs))


def _made_up(fake: FakeTensor, shape: list[int]) -> torch.Tensor:
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        made = torch.randn(shape, dtype=torch.float32, device=fake.device).to(fake.dtype)
        return grown(made) if fake.requires_grad else made
    if fake.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool, device=fake.device)
    return torch.zeros(shape, dtype=fake.dtype, device=fake.device)
