"""Gather and reduce the parameters of a stage that is wrapped by `fully_shard`.

UNSHARD starts the gathering; whoever computes next with the stage waits for it. Gradients
stay unreduced on the gathered parameters until REDUCE_GRAD starts to reduce them, once per step;
the end of the step waits for that. A step that does not reduce leaves them there for the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fxpipe.runtime.parameters.ddp import Earlier, Wait
from fxpipe.runtime.parameters.lost_groups import collective_of, explained
from fxpipe.runtime.parameters.trained import Trained
from fxpipe.torch_inside import (
    finish_sharded_backward,
    forget_sharded_step,
    leave_sharded_pass,
    prepare_sharded,
    put_gathered_gradient,
    shard_groups,
    shard_precision,
    take_gathered_gradient,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FsdpSync", "fsdp_roots", "gathered_dtypes"]


class FsdpSync:
    """The stage is wrapped by `fully_shard`: gather once per step, reduce once."""

    is_sharded = True

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = roots
        self.groups = _groups(roots, "shard_process_group", "replicate_process_group")
        self.gathers_over = _groups(roots, "shard_process_group")
        self.reduces = True
        self.trained = Trained(roots)  # type: ignore[arg-type]
        self._may_reduce: Callable[[], bool] = bool
        self._gathering: list[Any] = []
        self._num_users = 0  # stages of this process that want them gathered: one, or one per round
        self._has_reduced = False
        # Of steps that did not reduce: unlike `.grad`, it is as large as the whole parameter.
        self._unreduced: dict[Any, torch.Tensor] = {}
        self._used: list[bool] = []
        self._bare: list[Any] = []
        # What forwards would free they would gather again for each microbatch, and replicas of one
        # that has failed would wait for it there: it only does what its program says.
        self._resharding: list[tuple[Any, Any]] = []

    def held(self) -> list[nn.Parameter]:
        return []  # each stage has shards of its own

    def begin(self, earlier: Earlier, *, reduces: bool, may_reduce: Callable[[], bool]) -> None:
        self.reduces, self._has_reduced, self._may_reduce = reduces, False, may_reduce
        self._num_users = 0
        for root in self._roots:
            prepare_sharded(root)  # a rank that fails before its first forward reduces, too
        self._resharding = [(g, g.post_forward_mesh_info) for g in self._shard_groups()]
        for group, _ in self._resharding:
            group.post_forward_mesh_info = None
        held = self._held()
        found = [(one, take_gathered_gradient(one)) for one in held]
        self._unreduced = {one: grad for one, grad in found if grad is not None}
        self._used = [False] * len(held)
        self._bare = [one for one in held if one.sharded_param.grad is None]
        self._set(is_last=False)

    def _held(self) -> list[Any]:
        """The parameters that want a gradient."""
        every = [p for group in self._shard_groups() for p in group.fsdp_params]
        return [p for p in every if p.sharded_param.requires_grad]

    def _shard_groups(self) -> list[Any]:
        return [g for root in self._roots for m in _fsdp_modules(root) for g in shard_groups(m)]

    def _set(self, *, is_last: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)

    def _leave_pass(self) -> None:
        """Between computations: after one that has failed, too, collectives are the program's."""
        for group in self._shard_groups():
            leave_sharded_pass(group)

    def unshard(self) -> None:
        self._num_users += 1
        self._leave_pass()
        for root in self._roots:
            for module in _fsdp_modules(root):
                self._gathering.append(module.unshard(async_op=True))

    def ready(self) -> None:
        if not self._gathering:
            return
        with collective_of(self.groups):
            while self._gathering:
                self._gathering.pop().wait()

    def reshard(self) -> None:
        self._num_users -= 1
        if self._num_users > 0:
            return
        self.ready()  # what is still on its way would be taken for the next step's
        self._leave_pass()
        for root in self._roots:
            for module in _fsdp_modules(root):
                module.reshard()

    def reduce(self) -> None:
        """Start to reduce; what a replica has not used takes part as zeros."""
        self.ready()
        if self._has_reduced or not self._may_reduce():
            return
        self._has_reduced = True
        for i, one in enumerate(self._held()):
            total = self._total(one)
            self._used[i] = total is not None
            put_gathered_gradient(one, total)
        self._set(is_last=True)
        modules = [module for root in self._roots for module in reversed(_fsdp_modules(root))]
        problem: BaseException | None = None
        for group in [g for module in modules for g in reversed(shard_groups(module))]:
            try:
                group.post_backward()
            except BaseException as error:  # of a user's hook, too: replicas wait for the rest
                problem = problem or error
        if problem is not None:
            raise explained(problem, self.groups)

    def _total(self, one: Any) -> torch.Tensor | None:
        """This step's gradient and those before it, which stay as they are."""
        fresh, before = take_gathered_gradient(one), self._unreduced.get(one)
        if fresh is None or before is None:
            return before if fresh is None else fresh
        return fresh.add_(before)

    def used(self) -> list[bool]:
        return self._used or [False] * len(self._held())

    def left(self) -> list[bool]:
        return []

    def finish(self, used: Sequence[bool], left: Sequence[bool], wait: Wait) -> None:
        with collective_of(self.groups):
            for root in self._roots:
                root.set_is_last_backward(True)
                finish_sharded_backward(root)  # waits for reductions; on a device, without the host
        if self._has_reduced:
            for one, is_used in zip(self._held(), used, strict=True):
                if not is_used and one in self._bare:
                    one.sharded_param.grad = None

    def end(self, *, succeeded: bool) -> None:
        for group, after_forward in self._resharding:
            group.post_forward_mesh_info = after_forward
        self._resharding = []
        if not succeeded:
            for root in self._roots:
                forget_sharded_step(root)
            for one in self._held():
                take_gathered_gradient(one)
        if not succeeded or not self._has_reduced:
            for one in self._held():
                total = self._total(one)
                if total is not None:
                    put_gathered_gradient(one, total)
        self._unreduced, self._used, self._bare, self._num_users = {}, [], [], 0
        self._set(is_last=True)


def gathered_dtypes(module: nn.Module) -> list[torch.dtype]:
    """What sharded parameters are cast to for computing, where that is another dtype."""
    roots = fsdp_roots(module)
    parts: list[Any] = [part for root in roots for part in _fsdp_modules(root)]
    found = [shard_precision(part).param_dtype for part in parts]
    return [dtype for dtype in found if dtype is not None]


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules."""
    if _is_fsdp(module):
        return [module]  # type: ignore[list-item]
    return [root for child in module.children() for root in fsdp_roots(child)]


def _fsdp_modules(root: FSDPModule) -> list[FSDPModule]:
    assert isinstance(root, nn.Module)
    return [module for module in root.modules() if _is_fsdp(module)]  # type: ignore[misc]


def _is_fsdp(module: nn.Module) -> bool:
    # Importing the library takes seconds; whoever wrapped a module has done so already.
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule)


def _groups(roots: Sequence[FSDPModule], *names: str) -> list[dist.ProcessGroup]:
    """The groups that the collectives of sharded modules use, of these kinds."""
    modules = [module for root in roots for module in _fsdp_modules(root)]
    every = [group.mesh_info for module in modules for group in shard_groups(module)]
    found = [getattr(info, name, None) for info in every for name in names]
    return [one for one in found if one is not None]
