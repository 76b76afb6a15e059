"""Which attention masks are not made, because attention does without.

In:  a `TracedGraph`, a node of it, a value for each size symbol.
Out: whether the node is a call of a mask function that returns None at these sizes, so that
     the modules which get it call their kernels with `is_causal=True`.

The function runs on real tensors, since it looks at values. Those that follow from sizes alone
are computed; a mask that depends on an input of the model counts as made: the values decide, and
a plan must hold for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.graph.calls.attention_masks import may_be_none
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.dims import evaluate
from fxpipe.graph.facts import map_arguments
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.nested import map_leaves
from fxpipe.graph.record.tape import StageDevice
from fxpipe.torch_inside import TorchDispatchMode, unset_fake_temporarily

__all__ = ["MaskRuns", "Sizes"]

Sizes = Mapping[str, int]
"""A value for each size symbol."""

_CPU = torch.device("cpu")
# A function that computes with more elements than this is making the mask.
_MOST = 1 << 24


class MaskRuns:
    """Calls the mask functions of one graph."""

    def __init__(self, traced: TracedGraph) -> None:
        self._traced = traced
        self._known: dict[tuple[fx.Node, tuple[tuple[str, int], ...]], bool] = {}

    def is_none(self, node: fx.Node, sizes: Sizes) -> bool:
        """Say whether a node is a mask that is not made at given sizes."""
        if not may_be_none(node):
            return False
        if node.target.is_flex:  # type: ignore[union-attr]
            return True  # a block mask takes next to nothing
        key = (node, tuple(sorted(sizes.items())))
        if key not in self._known:
            self._known[key] = self._returns_none(node, sizes)
        return self._known[key]

    def _returns_none(self, node: fx.Node, sizes: Sizes) -> bool:
        made: dict[fx.Node, Any] = {}
        with unset_fake_temporarily(), torch.no_grad():
            for shown in self._traced.facts[node].untouched:
                made[shown] = map_leaves(
                    lambda part: _empty(part, sizes), self._traced.facts[shown].spec
                )
            try:
                return self._run(node, sizes, made) is None
            except Exception:  # it depends on inputs or state, or is large, or fails
                return False

    def _run(self, node: fx.Node, sizes: Sizes, made: dict[fx.Node, Any]) -> Any:
        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if value not in made:
                    made[value] = self._run(value, sizes, made)
                return made[value]
            if isinstance(value, sympy.Basic):
                return evaluate(value, sizes)
            return _CPU if isinstance(value, StageDevice) else value

        if node.op not in ("call_function", "call_method"):
            raise _DependsError(node.name)
        args, kwargs = map_arguments(argument, (tuple(node.args), dict(node.kwargs)))
        with _Small():  # type: ignore[no-untyped-call]
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]


class _DependsError(Exception):
    """A mask depends on more than sizes."""


class _Small(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before anything large is computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        sizes = [a for a in args if isinstance(a, (list, tuple)) and all(map(_is_int, a))]
        wide = math.prod(max(dims) for dims in _aligned([*shapes, *sizes]))
        if wide > _MOST:
            raise _DependsError(str(func))
        return func(*args, **(kwargs or {}))


def _is_int(value: Any) -> bool:
    return isinstance(value, int)


def _aligned(shapes: list[Any]) -> list[list[int]]:
    """The sizes of each dimension of several shapes, the last ones against each other."""
    longest = max(map(len, shapes), default=0)
    return [
        [shape[-place] for shape in shapes if len(shape) >= place]
        for place in range(1, longest + 1)
    ]


def _empty(part: Any, sizes: Sizes) -> Any:
    if not isinstance(part, TensorSpec):
        return part
    shape = [int(size) for size in part.bind(sizes).shape]
    return torch.zeros((), dtype=part.dtype).expand(shape)
