"""Average the gradients of a stage that is wrapped in DistributedDataParallel.

Its own hooks expect one whole backward per reduction, which split backwards do not give; so
they are kept silent. As in DDP itself:

- all of `.grad` is averaged, also what steps under `no_sync()` have left there;
- the buffers of the first replica are given to the others after a step that averages
  (DDP: before the next forward), unless `broadcast_buffers=False`.

Buckets are reduced while the rest of the pipeline still works. They hold all parameters that
want a gradient, with zeros for unused ones, so that all replicas make the same buckets without
asking; what nobody has used loses its zeros again. A parameter that several stages of this process
hold, such as tied embeddings where the first and the last stage meet, is averaged by one of them,
when all have added to it. What DDP would do in a reduction of its own (communication hooks, static
graphs, `join()`) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxpipe.errors import InputError
from fxpipe.runtime.parameters.lost_groups import collective_of
from fxpipe.runtime.parameters.trained import Trained
from fxpipe.runtime.wire.communicators import backend_of
from fxpipe.torch_inside import joins_uneven_inputs, reduction_hooks, was_dtensor

__all__ = ["DdpSync", "Earlier", "Wait", "check_ddp"]

BUCKET_BYTES = 25 * 2**20

Earlier = MutableMapping[torch.Tensor, torch.Tensor]
"""Gradients of former steps that were put aside, by parameter."""

Wait = Callable[[dist.Work | None, dist.ProcessGroup], None]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Some tensors on their way through one all-reduce, and where the result goes."""

    flat: torch.Tensor
    work: dist.Work
    targets: list[torch.Tensor]
    group: dist.ProcessGroup

    @property
    def blocks(self) -> bool:
        """Whether to wait for it is to stop the host; else only the device waits."""
        return backend_of(self.group, self.flat.device) == "gloo"

    def give_back(self) -> None:
        self.flat.div_(self.group.size())
        parts = torch.split_with_sizes(self.flat, [target.numel() for target in self.targets])
        for target, part in zip(self.targets, parts, strict=True):
            target.copy_(part.view_as(target))


class DdpSync:
    """The stage is wrapped in DistributedDataParallel."""

    is_sharded = False
    gathers_over: Sequence[dist.ProcessGroup] = ()

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = modules
        self._before = [module.require_backward_grad_sync for module in modules]
        self.groups = [module.process_group for module in modules]
        self.reduces = True
        self.trained = Trained(modules)
        self._may_reduce: Callable[[], bool] = bool
        self._averaged: list[DistributedDataParallel] = []
        self._earlier: Earlier = {}
        self._unused: set[nn.Parameter] = set()  # whose gradient here is made up of zeros
        self._open: list[_Bucket] = []
        self.late: set[nn.Parameter] = set()  # other stages of this process add to them
        self.elsewhere: set[nn.Parameter] = set()  # and another stage averages these
        self._silence()

    def _silence(self) -> None:
        # The constructor has given everybody the first replica's values.
        for module in self._modules:
            module.require_forward_param_sync = False

    def begin(self, earlier: Earlier, *, reduces: bool, may_reduce: Callable[[], bool]) -> None:
        self._earlier, self._may_reduce = earlier, may_reduce
        self._before = [module.require_backward_grad_sync for module in self._modules]
        # Under no_sync() a module takes no part.
        self._averaged = [
            m for m, is_on in zip(self._modules, self._before, strict=True) if is_on and reduces
        ]
        self.reduces = len(self._averaged) == len(self._modules)
        for module in self._modules:
            module.require_backward_grad_sync = False
        self._silence()

    def unshard(self) -> None: ...

    def ready(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None:
        if not self._may_reduce():
            return
        for module in self._averaged:
            if module.process_group.size() == 1:
                continue
            some = [p for p in self._trained(module) if p not in self.late]
            self._unused.update(p for p in some if p.grad is None)
            self._open += _averages([_gradient(p) for p in some], module.process_group)

    def used(self) -> list[bool]:
        every = [p for module in self._modules for p in self._trained(module)]
        return [p.grad is not None and p not in self._unused for p in every]

    def left(self) -> list[bool]:
        return [p in self._earlier for module in self._modules for p in self._trained(module)]

    def finish(self, used: Sequence[bool], left: Sequence[bool], wait: Wait) -> None:
        every = [p for module in self._modules for p in self._trained(module)]
        fresh = {p for p, is_used in zip(every, used, strict=True) if is_used}
        old = {p for p, is_left in zip(every, left, strict=True) if is_left}
        for module in self._averaged:
            group = module.process_group
            if group.size() > 1:
                some = self._trained(module)
                late = [_gradient(p) for p in some if p in self.late and p in fresh]
                earlier = [self._earlier_of(p) for p in some if p in old]
                self._open += _averages([*late, *earlier], group)
                _broadcast_buffers(module, group)
        for bucket in self._open:
            if bucket.blocks:
                wait(bucket.work, bucket.group)
            else:
                bucket.work.wait()
            bucket.give_back()
        for p in self._unused - fresh:
            p.grad = None
        self._unused.clear()

    def held(self) -> list[nn.Parameter]:
        return [p for module in self._modules for p in _averaged(module)]

    def _trained(self, module: DistributedDataParallel) -> list[nn.Parameter]:
        return [p for p in _averaged(module) if p not in self.elsewhere]

    def _earlier_of(self, p: nn.Parameter) -> torch.Tensor:
        """A copy to average: a step that fails leaves the gradient itself as it was."""
        found = self._earlier.get(p)
        self._earlier[p] = torch.zeros_like(p) if found is None else found.clone()
        return self._earlier[p]

    def end(self, *, succeeded: bool) -> None:
        for p in self._unused:
            p.grad = None
        self._unused.clear()
        self._open.clear()
        self._earlier = {}
        for module, before in zip(self._modules, self._before, strict=True):
            module.require_backward_grad_sync = before


def check_ddp(module: DistributedDataParallel) -> None:
    """Refuse what needs the reduction that DDP would start itself.

    Raises:
        InputError: saying what to do instead.
    """
    what = ""
    hooks = reduction_hooks(module)
    if hooks:
        named = getattr(hooks[0][0], "__qualname__", type(hooks[0][0]).__name__)
        what = (
            f"has the communication hook {named}, which would not be called: leave it out, or "
            "use fully_shard, whose mixed precision policy has a reduce_dtype"
        )
    elif module.static_graph:
        what = (
            "has static_graph=True, but a pipeline runs several forwards before a backward: leave "
            "it out; gradients are averaged once per step without it"
        )
    elif joins_uneven_inputs(module):
        what = "is inside join(), but replicas make every step together: give all as many batches"
    elif any(map(was_dtensor, module.parameters())):
        what = (
            "has tensor-parallel parameters, which its forward takes out of parameters(): use "
            "fully_shard with a mesh, which keeps them"
        )
    if what:
        raise InputError(
            f"the DistributedDataParallel around {type(module.module).__name__} {what}"
        )


def _averaged(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Those that want a gradient, without those that DDP was told to ignore."""
    named = module.module.named_parameters()
    ignored = module.parameters_to_ignore
    return [p for name, p in named if p.requires_grad and name not in ignored]


def _gradient(p: nn.Parameter) -> torch.Tensor:
    """`.grad`; zero where only another replica has used the parameter."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def _averages(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> list[_Bucket]:
    """Start to average tensors over the group, in buckets of equal dtype, in one fixed order."""
    made = []
    buckets = _buckets(tensors)
    # All of them before the first is on its way: memory that runs out leaves none half done.
    flats = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets]
    for bucket, flat in zip(buckets, flats, strict=True):
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        made.append(_Bucket(flat, work, bucket, group))
    return made


def _broadcast_buffers(module: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    if not module.broadcast_buffers:
        return
    ignored = set(module.parameters_to_ignore)
    named = module.module.named_buffers()
    buffers = [buffer.detach() for name, buffer in named if name not in ignored]
    first = dist.get_global_rank(group, 0)
    for bucket in _buckets(buffers):
        flat = torch.cat([buffer.reshape(-1) for buffer in bucket])
        with collective_of([group]):
            dist.broadcast(flat, first, group=group)
        if group.rank() == 0:
            continue
        parts = torch.split_with_sizes(flat, [buffer.numel() for buffer in bucket])
        for buffer, part in zip(bucket, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        key = (tensor.dtype, tensor.device)
        bucket, left = room.get(key, ([], 0))
        if left < bytes_:
            bucket, left = [], BUCKET_BYTES
            buckets.append(bucket)
        bucket.append(tensor)
        room[key] = (bucket, left - bytes_)
    return buckets
