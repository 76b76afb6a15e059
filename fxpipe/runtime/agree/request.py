"""What a schedule was asked for, what a step was passed, and what was agreed on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.microbatch import split_batch
from fxpipe.program import Edges, Program
from fxpipe.runtime.stage.boundary import Boundary, Skeleton
from fxpipe.runtime.stage.executor import Executor
from fxpipe.runtime.stage.stage_kind import Stage, TracedFront
from fxpipe.runtime.stage.stage_runner import StageRunner, Wiring

__all__ = ["Call", "Chunks", "Options", "Route", "StepPlan", "split_call"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a schedule was asked for."""

    loss_fn: Callable[..., Any] | None = None
    args_chunk_spec: tuple[Any, ...] | None = None
    kwargs_chunk_spec: Mapping[str, Any] | None = None
    scale_grads: bool = True
    timeout: float = 1800.0
    receives: Any = "early"
    max_unsharded: int = 3
    tied: tuple[Any, ...] = ()


@dataclass(slots=True)
class Call:
    """What the user passed to one step on this process."""

    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any]
    keeps_outputs: bool


@dataclass(slots=True)
class Chunks:
    """The inputs of this process, microbatch by microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    rows: tuple[int, ...] | None
    check_unchanged: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Route:
    """A model input that rank `target` needs, was not given, and gets from `source`."""

    name: str
    source: int
    target: int
    skeleton: Skeleton
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(slots=True)
class StepPlan:
    """One kind of step, agreed on and bound to functions."""

    rows: tuple[int, ...] | None
    weights: tuple[float, ...]
    routes: tuple[Route, ...]
    shared: tuple[str, ...]
    wiring: Mapping[int, Sequence[Wiring]]
    runners: Mapping[int, StageRunner]
    executors: list[Executor]
    order: list[tuple[int, int]]
    wants_loss: bool
    edges: Edges
    program: Program
    boundaries: Sequence[Boundary]


def split_call(call: Call, stages: Mapping[int, Stage], options: Options, n: int) -> Chunks:
    """Split what this process was passed; names instead of positions for traced stages."""
    if not call.args and not call.kwargs:
        return Chunks([()] * n, [{} for _ in range(n)], None)
    kwargs_spec = options.kwargs_chunk_spec
    if isinstance(kwargs_spec, Mapping):  # names that no rank knows are refused by `_check_specs`
        kwargs_spec = {k: v for k, v in kwargs_spec.items() if k in call.kwargs}
    split = split_batch(call.args, call.kwargs, n, options.args_chunk_spec, kwargs_spec or None)
    front = next(iter(stages.values())).front
    if isinstance(front, TracedFront):
        named = [
            front.info.name_inputs(args, kwargs, partial=True)
            for args, kwargs in zip(split.args, split.kwargs, strict=True)
        ]
        return Chunks([()] * n, named, split.rows, split.check_unchanged)
    kwargs = [dict(k) for k in split.kwargs]
    return Chunks(list(split.args), kwargs, split.rows, split.check_unchanged)
