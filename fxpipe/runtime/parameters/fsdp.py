"""Gather and reduce the parameters of a stage that is wrapped by `fully_shard`.

UNSHARD starts the gathering; whoever computes next with the stage waits for it. Gradients
stay unreduced on the gathered parameters until REDUCE_GRAD reduces them, once per step.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fxpipe.runtime.parameters.replicas import Replicas
from fxpipe.torch_inside import (
    drop_gathered_gradients,
    finish_sharded_backward,
    has_run_sharded,
    shard_groups,
    shard_precision,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FsdpSync", "fsdp_roots", "gathered_dtypes"]


class FsdpSync:
    """The stage is wrapped by `fully_shard`: gather once per step, reduce once."""

    is_sharded = True

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = roots
        self._reduced = True
        self._gathering: list[Any] = []
        self._replicas = Replicas([group for root in roots for group in _groups(root)])

    def expect(self, unshards: int, reductions: int) -> None:
        self._replicas.owes = unshards + reductions

    def begin(
        self, seconds: float, earlier: MutableMapping[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        self._reduced = False
        self._replicas.begin(seconds)
        for root in self._roots:
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)

    def unshard(self) -> None:
        self._replicas.check()
        for root in self._roots:
            for module in _fsdp_modules(root):
                self._gathering.append(module.unshard(async_op=True))

    def ready(self) -> None:
        while self._gathering:
            self._gathering.pop().wait()

    def reshard(self) -> None:
        self.ready()  # what is still on its way would be taken for the next step's
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
            for module in reversed(_fsdp_modules(root)):
                for group in reversed(shard_groups(module)):
                    group.post_backward()
            finish_sharded_backward(root)

    def finish(self) -> None: ...

    def give_up(self, message: str) -> None:
        self._replicas.give_up(message)

    def end(self) -> None:
        for root in self._roots:
            if not self._reduced and has_run_sharded(root):
                root.reset_iter_state()
                _drop_partial_gradients(root)
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)


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


def _drop_partial_gradients(root: FSDPModule) -> None:
    """What a failed step has left on gathered parameters."""
    for module in _fsdp_modules(root):
        for group in shard_groups(module):
            for held in group.fsdp_params:
                drop_gathered_gradients(held)


def _groups(root: FSDPModule) -> list[dist.ProcessGroup]:
    """The groups that the collectives of sharded modules use."""
    found: list[dist.ProcessGroup] = []
    for module in _fsdp_modules(root):
        for group in shard_groups(module):
            names = ("shard_process_group", "replicate_process_group")
            both = [getattr(group.mesh_info, name, None) for name in names]
            found += [one for one in both if one is not None]
    return found
