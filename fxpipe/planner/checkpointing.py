"""Checkpoint blocks as a plan asks for it.

In:  a module, the names of blocks in it, "selective", "alternate" or "full".
Out: the same module, whose blocks keep less and compute part of their forward again.

Blocks are wrapped in place, by their `forward`; parameters and their names stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from fxpipe.planner.cost.training import Checkpointing
from fxpipe.torch_inside import CPU_ATTENTION, overload_packet

__all__ = ["apply_checkpointing", "remove_checkpointing"]

_MARK = "_fxpipe_plain_forward"


def apply_checkpointing(module: nn.Module, blocks: Iterable[str], how: Checkpointing) -> list[str]:
    """Wrap those of the named blocks that the module has; return their names."""
    parts = dict(module.named_modules())
    found = [name for name in blocks if name in parts]
    for name in found:
        remove_checkpointing(parts[name])
        if how != "none":
            _wrap(parts[name], how)
    return found


def remove_checkpointing(module: nn.Module) -> None:
    """Take off what `apply_checkpointing` put on this module."""
    if _MARK in module.__dict__:
        del module.__dict__[_MARK]
        del module.__dict__["forward"]


def _wrap(module: nn.Module, how: Checkpointing) -> None:
    plain = module.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
    elif how == "alternate":
        options["context_fn"] = _alternating

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, **options, **kwargs)

    module.__dict__[_MARK] = plain
    module.__dict__["forward"] = forward


_PRODUCTS = frozenset({*flop_registry, CPU_ATTENTION})


def _alternating() -> Any:
    return create_selective_checkpoint_contexts(_Alternate())  # type: ignore[no-untyped-call]


class _Alternate:
    """Keeps attention and the first of every two products of one call."""

    def __init__(self) -> None:
        self._counts = {False: 0, True: 0}  # the forward, and its repetition

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = _keep(context, op)
        if kept is CheckpointPolicy.MUST_SAVE and "attention" not in str(op):
            self._counts[context.is_recompute] += 1
            if self._counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return kept


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Results of products are kept, all else is computed again."""
    packet = overload_packet(op)
    if packet in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
