"""What a schedule was asked for, and what one call was passed on this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.microbatch import Microbatches, split_batch
from fxpipe.runtime.stage.stage_kind import Front

__all__ = ["Call", "Chunks", "Options", "split_call"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a schedule was asked for."""

    loss_fn: Callable[..., Any] | None = None
    args_chunk_spec: tuple[Any, ...] | None = None
    kwargs_chunk_spec: Mapping[str, Any] | None = None
    output_merge_spec: Any = None
    scale_grads: bool = True
    timeout: float = 1800.0
    receives: Any = "early"
    max_unsharded: int = 3
    tied: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """What the user passed to one step on this process."""

    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any]
    keeps_outputs: bool
    losses: list[torch.Tensor] | None = None

    def taken(self, n: int) -> Call:
        """The same call with microbatches taken from their iterators, once per step."""

        def taken(value: Any) -> Any:
            if isinstance(value, Microbatches):
                return Microbatches(value.take(n), rows=value.rows)
            return value

        return replace(self, args=tuple(map(taken, self.args)), target=taken(self.target))


@dataclass(slots=True)
class Chunks:
    """The inputs of this process, microbatch by microbatch, as the stages take them."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    rows: tuple[int, ...] | None
    check_unchanged: Callable[[], None] = lambda: None


def split_call(call: Call, front: Front, options: Options, n: int) -> Chunks:
    """Split what this process was passed."""
    if not call.args and not call.kwargs:
        return Chunks([()] * n, [{} for _ in range(n)], None)
    kwargs_spec = options.kwargs_chunk_spec
    if isinstance(kwargs_spec, Mapping):  # names that no rank knows are refused in agreeing
        kwargs_spec = {k: v for k, v in kwargs_spec.items() if k in call.kwargs}
    split = split_batch(call.args, call.kwargs, n, options.args_chunk_spec, kwargs_spec or None)
    named = [front.name_inputs(a, k) for a, k in zip(split.args, split.kwargs, strict=True)]
    args, kwargs = [a for a, _ in named], [k for _, k in named]
    return Chunks(args, kwargs, split.rows, split.check_unchanged)
