"""How to call a stage's module, and where its interface comes from.

A traced stage takes received tensors and model inputs by name; a hand-written one
takes whatever the stage before it returned. Everything else about stages is the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from fxpipe.runtime.stage.boundary import Skeleton

if TYPE_CHECKING:
    from fxpipe.graph.pipe import PipeInfo

__all__ = ["ManualFront", "Stage", "TracedFront"]


class Stage(Protocol):
    """What the runtime needs to know of a stage; `fxpipe.stage.PipelineStage` is one."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    device: torch.device
    dw_builder: Callable[[], Callable[..., None]] | None
    front: ManualFront | TracedFront

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ManualFront:
    """How to call a module that a user wrote as a stage."""

    input_args: tuple[Any, ...] | None
    output_args: tuple[Any, ...] | None

    def accepts(self, module: nn.Module) -> frozenset[str] | None:
        """Names of keyword inputs the module takes; None: any."""
        return _keyword_names(module)

    def call(
        self,
        module: nn.Module,
        received: Sequence[torch.Tensor],
        skeleton: Skeleton | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the module; what the stage before returned becomes its arguments."""
        if skeleton is not None:
            value = skeleton.build(received)
            # A plain tuple is the next stage's argument list; any other value,
            # a named tuple included, is one argument.
            args = value if type(value) is tuple else (value,)
        return module(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class TracedFront:
    """How to call a stage that was cut out of a captured model."""

    info: PipeInfo
    stage: int

    def call(
        self,
        module: nn.Module,
        received: Sequence[torch.Tensor],
        skeleton: Skeleton | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the module on received tensors, and on model inputs by name."""
        del skeleton, args
        return module(*received, **kwargs)


def _keyword_names(module: nn.Module) -> frozenset[str] | None:
    forward = module.forward
    for inner in ("module", "_orig_mod"):  # DistributedDataParallel, torch.compile
        wrapped = getattr(module, inner, None)
        if isinstance(wrapped, nn.Module) and _takes_anything(forward):
            forward = wrapped.forward
    if _takes_anything(forward):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds)


def _takes_anything(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
