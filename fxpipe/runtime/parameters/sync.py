"""How the parameters of a stage are kept in step with the stage's replicas.

A `GradSync` knows one data-parallel library. While a step runs, nothing is
reduced; REDUCE_GRAD then averages a stage's gradients over its replicas, once.
So every schedule gives what one backward over the whole batch would give, also
when weight gradients come later than input gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxpipe.errors import InputError
from fxpipe.program import Action, Kind
from fxpipe.runtime.parameters.ddp import DdpSync, Earlier, Wait, check_ddp
from fxpipe.runtime.parameters.fsdp import FsdpSync, fsdp_roots
from fxpipe.runtime.parameters.trained import Trained

__all__ = [
    "GradSync", "NoSync", "check_wrapper", "collective", "divide_shared", "do_collectives",
    "grad_sync", "not_averaged",
]  # fmt: skip


class GradSync(Protocol):
    """How one stage's parameters are kept in step with its replicas."""

    is_sharded: bool
    reduces: bool
    """Whether this step reduces gradients; else they are left for a later one."""
    trained: Trained

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """All that the stage's collectives go over."""

    @property
    def gathers_over(self) -> Sequence[dist.ProcessGroup]:
        """Those of them that an evaluation needs."""

    def held(self) -> list[nn.Parameter]:
        """The parameters with a gradient that another stage of this process may hold as well."""

    def begin(self, earlier: Earlier, *, reduces: bool, may_reduce: Callable[[], bool]) -> None:
        """Before the first action of a step; one that trains, unless the stage is sharded.

        `earlier` are gradients of former steps that were put aside. Those that were never
        averaged are replaced there by their average. `may_reduce` is asked before the first
        collective of gradients: whether all replicas would make the same.
        """

    def unshard(self) -> None:
        """Start to gather the parameters."""

    def ready(self) -> None:
        """Before a computation: the parameters are there."""

    def reshard(self) -> None: ...

    def reduce(self) -> None:
        """After the stage's last weight gradient: start to average over the replicas."""

    def used(self) -> list[bool]:
        """For each parameter that wants a gradient: whether this step has made one."""

    def left(self) -> list[bool]:
        """For each: whether former steps have left one that was never averaged."""

    def finish(self, used: Sequence[bool], left: Sequence[bool], wait: Wait) -> None:
        """After the last action, with what any replica has flagged: the averages are in `.grad`."""

    def end(self, *, succeeded: bool) -> None:
        """After the step, also after a failed one."""


class NoSync:
    """The stage has no replicas."""

    is_sharded = False
    reduces = True
    groups: Sequence[dist.ProcessGroup] = ()
    gathers_over: Sequence[dist.ProcessGroup] = ()
    trained = Trained(())  # there is nobody to compare it with

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def held(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def begin(self, earlier: Earlier, *, reduces: bool, may_reduce: Callable[[], bool]) -> None: ...

    def unshard(self) -> None: ...

    def ready(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None: ...

    def used(self) -> list[bool]:
        return []

    def left(self) -> list[bool]:
        return []

    def finish(self, used: Sequence[bool], left: Sequence[bool], wait: Wait) -> None: ...

    def end(self, *, succeeded: bool) -> None: ...


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
    return NoSync(module)


def check_wrapper(module: nn.Module) -> None:
    """Refuse a wrapper that wants to gather or reduce by itself.

    Raises:
        InputError: saying what to do instead.
    """
    if isinstance(module, DistributedDataParallel):
        check_ddp(module)
    elif type(module).__name__ == "FullyShardedDataParallel":
        raise InputError(
            "a stage is wrapped in FullyShardedDataParallel, which reduces in every backward: use "
            "torch.distributed.fsdp.fully_shard"
        )


def not_averaged(module: nn.Module) -> list[str]:
    """Names of a stage's plain parameters that want a gradient and are in no wrapper."""
    wrapped: list[Any] = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    inside = {p for one in (*wrapped, *fsdp_roots(module)) for p in one.parameters()}
    return [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and p not in inside and not hasattr(p, "device_mesh")
    ]


def divide_shared(syncs: Sequence[GradSync]) -> None:
    """Let one stage average what several stages of this process hold, after all have added to it.

    Its gradient is whole after the last of them. A bucket of an earlier one would put its own
    part in the place of the whole.
    """
    if not any(isinstance(sync, DdpSync) for sync in syncs) or len(syncs) == 1:
        return
    holders: dict[nn.Parameter, list[GradSync]] = {}
    for sync in syncs:
        for p in dict.fromkeys(sync.held()):
            holders.setdefault(p, []).append(sync)
    shared = {
        p: [sync for sync in found if isinstance(sync, DdpSync)]
        for p, found in holders.items()
        if len(found) > 1
    }
    for sync in syncs:
        if isinstance(sync, DdpSync):
            sync.late = {p for p, found in shared.items() if sync in found[:1]}
            sync.elsewhere = {p for p, found in shared.items() if sync in found[1:]}


def collective(sync: GradSync, kind: Kind) -> Callable[[], None] | None:
    """What an action of a kind asks of a stage's synchronisation, if anything."""
    if kind is Kind.UNSHARD:
        return sync.unshard
    if kind is Kind.RESHARD:
        return sync.reshard
    return sync.reduce if kind is Kind.REDUCE_GRAD else None


def do_collectives(actions: Iterable[Action], syncs: dict[int, GradSync]) -> None:
    """Do the collectives of a rank's program, and nothing else of it."""
    for action in actions:
        if action.stage in syncs:
            run = collective(syncs[action.stage], action.kind)
            if run is not None:
                run()
