"""Run one torch function of opened code on fake tensors, by whatever way works.

Most functions follow symbolic sizes. Some insist on sizes that do not matter to
them, or cannot follow; those are run at plain sizes, like leaves. A custom autograd
function may leave torch altogether; it runs on made-up tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.graph.record.constant_values import ValueDecidesError
from fxpipe.graph.record.leaf_runs import LeafRuns
from fxpipe.graph.record.torch_functions import INSISTENT

__all__ = ["DATA_DEPENDENT", "run_operation"]

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def run_operation(
    leaves: LeafRuns,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    real: bool,
    explain: Callable[[], str],
) -> Any:
    """Return what a function returns; `real` allows a run on made-up tensors.

    Raises:
        ValueDecidesError: values decide what happens, with the text of `explain`.
    """
    try:
        if any(word in getattr(func, "__name__", "") for word in INSISTENT):
            found = leaves.run_function(func, args, kwargs)
            if found:
                return found[0]
        return func(*args, **kwargs)
    except Exception as error:
        if isinstance(error, DATA_DEPENDENT) and not real:
            raise ValueDecidesError(explain()) from None
        # Some operations cannot follow symbols; learn the sizes like those of a leaf.
        found = leaves.run_function(func, args, kwargs)
        if found:
            return found[0]
        if real:
            return leaves.run_function_real(func, args, kwargs, error)
        raise
