"""Turn a plan into the stages and the schedule of this rank.

In:  a `Plan`, the model (again, if the plan was loaded), a device and a group.
Out: `Built`. Stages are cut as planned, blocks checkpointed, replicas wrapped in
     DistributedDataParallel or, for ZeRO 1, blocks and stages by `fully_shard`.

A sharded stage is gathered once per step and whole until its last microbatch, and so are its
gradients: what is divided among replicas while memory is short is the optimizer's state, as in
ZeRO 1. An option of ZeRO 2 or 3 is priced with less memory than a step here takes.

The model is captured again where a plan comes from a file; node names follow from the model
and from which modules are opened, so a different model is noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from fxpipe.errors import PlanError, SplitError
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.info import SavedSplit
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.cost.training import Checkpointing, Training
from fxpipe.planner.search.option import Option
from fxpipe.runtime.wire.local_group import LocalGroup
from fxpipe.torch_inside import CPU_ATTENTION, overload_packet

if TYPE_CHECKING:
    from fxpipe.planner.plan import Plan
    from fxpipe.schedules import Schedule
    from fxpipe.stage import PipelineStage

__all__ = ["Built", "build"]

_MARK = "_fxpipe_plain_forward"

Given = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Built:
    """What one process needs to train.

    `replica` is this process's replica of `num_replicas`; feed each its own share of the
    batch (`rows` of it). `checkpointed` names the blocks that compute their forward again.
    """

    pipe: Pipe
    stages: tuple[PipelineStage, ...]
    schedule: Schedule
    option: Option
    replica: int
    num_replicas: int
    rows: int
    checkpointed: tuple[str, ...]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this process's stages, each once, for an optimizer."""
        found = {id(p): p for stage in self.stages for p in stage.submod.parameters()}
        return list(found.values())


def build(
    plan: Plan,
    given: Given | None,
    choice: int,
    device: torch.device | str,
    group: dist.ProcessGroup | LocalGroup | None,
    loss_fn: Callable[..., Any] | None,
    options: Mapping[str, Any],
) -> Built:
    """See `Plan.build`."""
    from fxpipe.schedules import ScheduleFromProgram, get_schedule_class

    option = _chosen(plan, choice)
    candidate = option.candidate
    if not candidate.is_buildable:
        raise PlanError(
            f"fxpipe builds pipelines with replicas or ZeRO 1, but this option is {candidate}; "
            "apply tensor, context or expert parallelism to the stages yourself, or plan with "
            "tensor_parallel=1, context_parallel=1, expert_parallel=1, sharding=(0, 1). "
            "ZeRO 2 and 3 would need more memory than planned: a step keeps a stage gathered"
        )
    where = _place(option, group)
    pipe = _pipe(plan, option, given)
    if any(hasattr(p, "device_mesh") for stage in pipe.stages for p in stage.module.parameters()):
        raise PlanError(
            "the model is sharded already, by an earlier build or fully_shard; build with another "
            "copy of it: build(model, example_args)"
        )
    stages, checkpointed = [], []
    training = Training(checkpointing=candidate.checkpointing)
    blocks = [name for i, name in enumerate(plan.blocks) if training.recomputes(i)]
    names = blocks if plan.blocks != _whole(pipe) else [""]
    for index in (
        option.placement.stages_of(where.rank)
        if where.is_distributed
        else range(candidate.num_stages)
    ):
        stage = pipe.build_stage(index, torch.device(device), where.pipeline)
        checkpointed += _apply_checkpointing(stage.submod, names, candidate.checkpointing)
        if where.data is not None and any(p.requires_grad for p in stage.submod.parameters()):
            if candidate.sharding:
                _shard(stage.submod, plan.blocks, where.data)
            else:
                stage.submod = nn.parallel.DistributedDataParallel(
                    stage.submod, process_group=where.data
                )
        stages.append(stage)
    if candidate.offload:
        options = {"offload": candidate.offload, **options}
    if candidate.sharding:  # all stages of a rank are priced as gathered
        options = {"max_unsharded": candidate.stages_per_rank, **options}
    if option.program is not None:
        schedule: Schedule = ScheduleFromProgram(stages, option.program, loss_fn, **options)
    else:
        count = candidate.num_microbatches
        schedule = get_schedule_class(candidate.schedule)(stages, count, loss_fn, **options)
    return Built(
        pipe,
        tuple(stages),
        schedule,
        option,
        where.replica,
        candidate.data_parallel,
        candidate.microbatch_size * candidate.num_microbatches,
        tuple(checkpointed) if candidate.checkpointing != "none" else (),
    )


def _whole(pipe: Pipe) -> tuple[str, ...]:
    """What blocks are called where the stages of a pipe were planned as they are."""
    return tuple(f"stages.{stage.index}" for stage in pipe.stages)


def _chosen(plan: Plan, choice: int) -> Option:
    if not 0 <= choice < len(plan.options):
        raise PlanError(f"choice is one of the plan's {len(plan.options)} options, got {choice}")
    return plan.options[choice]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this process stands: the groups along the pipeline and across replicas."""

    pipeline: dist.ProcessGroup | LocalGroup
    data: dist.ProcessGroup | None
    rank: int
    replica: int

    @property
    def is_distributed(self) -> bool:
        return not isinstance(self.pipeline, LocalGroup)


def _place(option: Option, group: dist.ProcessGroup | LocalGroup | None) -> _Place:
    ranks, width = option.candidate.pipeline, option.candidate.data_parallel
    if isinstance(group, LocalGroup) or (
        group is None and not (dist.is_available() and dist.is_initialized())
    ):
        if isinstance(group, LocalGroup) and group.num_ranks != ranks:
            raise PlanError(f"the plan's pipeline has {ranks} ranks, the group {group.num_ranks}")
        return _Place(LocalGroup(ranks), None, 0, 0)
    size, me = dist.get_world_size(group), dist.get_rank(group)
    if size != ranks * width:
        raise PlanError(
            f"the plan is for {ranks * width} processes ({width} replicas of {ranks} ranks), "
            f"but the group has {size}; plan again for {size}"
        )
    rank, replica = divmod(me, width)
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    if width == 1:
        return _Place(whole, None, rank, 0)
    everyone = dist.get_process_group_ranks(whole)
    # Every process takes part in making every group.
    make: Any = dist.new_group  # returns a number to who is not in the group
    lines = [make([everyone[r * width + j] for r in range(ranks)]) for j in range(width)]
    rows = [make([everyone[r * width + j] for j in range(width)]) for r in range(ranks)]
    return _Place(lines[replica], rows[rank], rank, replica)


def _pipe(plan: Plan, option: Option, given: Given | None) -> Pipe:
    if given is None:
        if plan.subject is None:
            raise PlanError(
                "a plan from a file does not hold the model: build(model, example_args)"
            )
        if plan.subject.pipe is not None:
            return plan.subject.pipe
        traced = plan.subject.uncut()
    else:
        model, args, kwargs = given
        traced = capture(model, args, kwargs, opened=set(plan.opened))
    stage_of = {name: stage for stage, names in enumerate(option.nodes) for name in names}
    try:
        return Pipe(traced, SavedSplit(frozenset(plan.opened), stage_of)(traced))
    except SplitError as error:
        raise PlanError(f"this is not the model that was planned: {error}") from error


def _shard(module: nn.Module, blocks: Iterable[str], group: dist.ProcessGroup) -> None:
    """Divide blocks and what is around them among replicas, in place.

    Gradients of 16 bits are added up and reduced in 32, as the plan counts them.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(module.parameters()).device.type
    mesh = DeviceMesh.from_group(group, device)
    is_narrow = any(p.dtype.itemsize < 4 for p in module.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_narrow else None)
    parts = dict(module.named_modules())
    for name in blocks:
        if name in parts:
            fully_shard(parts[name], mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _apply_checkpointing(module: nn.Module, blocks: Iterable[str], how: Checkpointing) -> list[str]:
    """Wrap those of the named blocks that the module has, in place, by their `forward`.

    Parameters and their names stay. Returns the names of the blocks.
    """
    parts = dict(module.named_modules())
    found = [name for name in blocks if name in parts]
    for name in found:
        _unwrap(parts[name])
        if how != "none":
            _wrap(parts[name], how)
    return found


def _unwrap(module: nn.Module) -> None:
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
    elif how == "expansions":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_narrow
        )

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


def _keep_narrow(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As `_keep`, without products that make more than four numbers of each they read."""
    weights = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2][-1:]
    is_product = "attention" not in str(op) and len(weights) == 1
    if is_product and weights[0].shape[1] > 4 * weights[0].shape[0]:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _keep(context, op)
