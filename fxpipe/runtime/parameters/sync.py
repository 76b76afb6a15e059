"""How the parameters of a stage are kept in step with the stage's replicas.

A `GradSync` knows one data-parallel library. While a step runs, nothing is
reduced; REDUCE_GRAD then averages a stage's gradients over its replicas, once.
So every schedule gives what one backward over the whole batch would give, also
when weight gradients come later than input gradients.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxpipe.errors import InputError
from fxpipe.program import Kind, Program
from fxpipe.runtime.parameters.ddp import DdpSync
from fxpipe.runtime.parameters.fsdp import FsdpSync, fsdp_roots

__all__ = ["GradSync", "NoSync", "expect_collectives", "grad_sync"]


class GradSync(Protocol):
    """How one stage's parameters are kept in step with its replicas."""

    is_sharded: bool

    def expect(self, unshards: int, reductions: int) -> None:
        """How often `unshard` and `reduce` come in a step."""

    def begin(
        self, seconds: float, earlier: MutableMapping[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """Before the first action of a training step, which may wait for so long.

        `earlier` are gradients of former steps that were put aside. Those that were never
        averaged are replaced there by their average.
        """

    def unshard(self) -> None:
        """Start to gather the parameters."""

    def ready(self) -> None:
        """Before a computation: the parameters are there."""

    def reshard(self) -> None: ...

    def reduce(self) -> None:
        """After the stage's last weight gradient: start to average over the replicas."""

    def finish(self) -> None:
        """After the last action: the averages are in `.grad`."""

    def give_up(self, message: str) -> None:
        """The step has failed here: tell the replicas, which would wait."""

    def end(self) -> None:
        """After the step, also after a failed one."""


class NoSync:
    """The stage has no replicas."""

    is_sharded = False

    def expect(self, unshards: int, reductions: int) -> None: ...

    def begin(
        self, seconds: float, earlier: MutableMapping[torch.Tensor, torch.Tensor] | None = None
    ) -> None: ...

    def unshard(self) -> None: ...

    def ready(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None: ...

    def finish(self) -> None: ...

    def give_up(self, message: str) -> None: ...

    def end(self) -> None: ...


def grad_sync(module: nn.Module) -> GradSync:
    """The synchronisation that fits how a stage's module is wrapped."""
    ddp = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    fsdp = fsdp_roots(module)
    if ddp and fsdp:
        raise InputError(
            "a stage is wrapped both in DistributedDataParallel and by fully_shard: use one"
        )
    if ddp:
        return DdpSync(ddp)
    if fsdp:
        return FsdpSync(fsdp)
    return NoSync()


def expect_collectives(sync: GradSync, program: Program, stage: int) -> None:
    """Tell a stage's synchronisation what a lowered program will ask of it."""
    rank = program.placement.stage_to_rank[stage]
    kinds = [action.kind for action in program.ranks[rank] if action.stage == stage]
    sync.expect(kinds.count(Kind.UNSHARD), kinds.count(Kind.REDUCE_GRAD))
