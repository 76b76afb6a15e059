"""Make gradients whole: across data-parallel replicas, and between tied copies.

A `GradSync` knows one data-parallel library. While a step runs, nothing is
reduced; REDUCE_GRAD then averages a stage's gradients over its replicas, once.
So every schedule gives what one backward over the whole batch would give, also
when weight gradients come later than input gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxpipe.program import Kind, Program
from fxpipe.runtime.parameters.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "DdpSync",
    "FsdpSync",
    "GradSync",
    "NoSync",
    "expect_collectives",
    "gathered_dtypes",
    "grad_sync",
]

BUCKET_BYTES = 25 * 2**20


class GradSync(Protocol):
    """How one stage's parameters are kept in step with its replicas."""

    is_sharded: bool

    def expect(self, unshards: int, reductions: int) -> None:
        """How often `unshard` and `reduce` come in a step."""

    def begin(self) -> None:
        """Before the first action of a training step."""

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None:
        """After the stage's last weight gradient: average over the replicas."""

    def give_up(self, message: str) -> None:
        """The step has failed here: tell the replicas, which would wait."""

    def end(self) -> None:
        """After the step, also after a failed one."""


class NoSync:
    """The stage has no replicas."""

    is_sharded = False

    def expect(self, unshards: int, reductions: int) -> None: ...

    def begin(self) -> None: ...

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None: ...

    def give_up(self, message: str) -> None: ...

    def end(self) -> None: ...


class DdpSync:
    """The stage is wrapped in DistributedDataParallel.

    Its own hooks expect one whole backward per reduction, which split backwards do
    not give; so they are kept silent and the gradients averaged here.
    """

    is_sharded = False

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = modules
        self._before = [module.require_backward_grad_sync for module in modules]
        self._replicas = Replicas(_distinct(module.process_group for module in modules))

    def expect(self, unshards: int, reductions: int) -> None:
        self._replicas.owes = reductions

    def begin(self) -> None:
        self._before = [module.require_backward_grad_sync for module in self._modules]
        if any(self._before):  # the user did not ask for no_sync() around the step
            self._replicas.begin()
        for module in self._modules:
            module.require_backward_grad_sync = False

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None:
        if any(self._before):
            self._replicas.check()
        for module, wanted in zip(self._modules, self._before, strict=True):
            if wanted:
                _average([p for p in module.parameters() if p.requires_grad], module.process_group)

    def give_up(self, message: str) -> None:
        self._replicas.give_up(message)

    def end(self) -> None:
        for module, before in zip(self._modules, self._before, strict=True):
            module.require_backward_grad_sync = before


class FsdpSync:
    """The stage is wrapped by `fully_shard`: gather once per step, reduce once."""

    is_sharded = True

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = roots
        self._reduced = True
        self._replicas = Replicas(_distinct(group for root in roots for group in _groups(root)))

    def expect(self, unshards: int, reductions: int) -> None:
        self._replicas.owes = unshards + reductions

    def begin(self) -> None:
        self._reduced = False
        self._replicas.begin()
        for root in self._roots:
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)

    def unshard(self) -> None:
        self._replicas.check()
        for root in self._roots:
            for module in _fsdp_modules(root):
                module.unshard()

    def reshard(self) -> None:
        for root in self._roots:
            for module in _fsdp_modules(root):
                module.reshard()

    def reduce(self) -> None:
        self._replicas.check()
        self._reduced = True
        for root in self._roots:
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            states = [module._get_fsdp_state() for module in _fsdp_modules(root)]
            for state in reversed(states):
                for group in reversed(_param_groups(state)):
                    group.post_backward()
            states[0]._root_post_backward_final_callback()

    def give_up(self, message: str) -> None:
        self._replicas.give_up(message)

    def end(self) -> None:
        for root in self._roots:
            if not self._reduced and root._get_fsdp_state()._is_root is not None:  # it has run
                root.reset_iter_state()
                _drop_partial_gradients(root)
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)


def grad_sync(module: nn.Module) -> GradSync:
    """The synchronisation that fits how a stage's module is wrapped."""
    ddp = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    fsdp = _fsdp_roots(module)
    if ddp and fsdp:
        raise TypeError(
            "a stage is wrapped both in DistributedDataParallel and by fully_shard: use one"
        )
    if ddp:
        return DdpSync(ddp)
    if fsdp:
        return FsdpSync(fsdp)
    return NoSync()


def gathered_dtypes(module: nn.Module) -> list[torch.dtype]:
    """What sharded parameters are cast to for computing, where that is another dtype."""
    roots = _fsdp_roots(module)
    states = [part._get_fsdp_state() for root in roots for part in _fsdp_modules(root)]
    found = [state._mp_policy.param_dtype for state in states]
    return [dtype for dtype in found if dtype is not None]


def expect_collectives(sync: GradSync, program: Program, stage: int) -> None:
    """Tell a stage's synchronisation what a lowered program will ask of it."""
    rank = program.placement.stage_to_rank[stage]
    kinds = [action.kind for action in program.ranks[rank] if action.stage == stage]
    sync.expect(kinds.count(Kind.UNSHARD), kinds.count(Kind.REDUCE_GRAD))


def _fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    if _is_fsdp(module):
        return [module]  # type: ignore[list-item]
    return [root for child in module.children() for root in _fsdp_roots(child)]


def _fsdp_modules(root: FSDPModule) -> list[FSDPModule]:
    assert isinstance(root, nn.Module)
    return [module for module in root.modules() if _is_fsdp(module)]  # type: ignore[misc]


def _is_fsdp(module: nn.Module) -> bool:
    # Importing the library takes seconds; whoever wrapped a module has done so already.
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule)


def _param_groups(state: Any) -> list[Any]:
    return list(state._fsdp_param_groups)


def _drop_partial_gradients(root: FSDPModule) -> None:
    """What a failed step has left on gathered parameters; zero_grad() does not see it."""
    for module in _fsdp_modules(root):
        for group in _param_groups(module._get_fsdp_state()):
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                gathered = getattr(held, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None


def _groups(root: FSDPModule) -> list[dist.ProcessGroup]:
    """The groups that the collectives of sharded modules use."""
    found: list[dist.ProcessGroup] = []
    for module in _fsdp_modules(root):
        for group in _param_groups(module._get_fsdp_state()):
            names = ("shard_process_group", "replicate_process_group")
            both = [getattr(group.mesh_info, name, None) for name in names]
            found += [one for one in both if one is not None]
    return found


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return list({id(group): group for group in groups}.values())


def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average `.grad` over the group, in buckets of equal dtype, in one fixed order.

    A parameter that no replica used keeps `.grad` None; one that only some used
    counts as zero on the others.
    """
    size = group.size()
    if size == 1 or not parameters:
        return
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    chosen = [p for p, flag in zip(parameters, used.tolist(), strict=True) if flag]
    for bucket in _buckets(chosen):
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= size
        parts = torch.split_with_sizes(flat, [grad.numel() for grad in grads])
        for p, grad, part in zip(bucket, grads, parts, strict=True):
            if p.grad is None:
                p.grad = part.view_as(grad).clone()
            else:
                p.grad.copy_(part.view_as(grad))


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for p in parameters:
        bytes_ = p.numel() * p.element_size()
        bucket, left = room.get(p.dtype, ([], 0))
        if left < bytes_:
            bucket, left = [], BUCKET_BYTES
            buckets.append(bucket)
        bucket.append(p)
        room[p.dtype] = (bucket, left - bytes_)
    return buckets
