"""A pipeline stage: a module, where it stands, and what it exchanges with others.

`PipelineStage` takes any module written by hand; `build_stage` (and
`Pipe.build_stage`) a module that fxpipe cut out of a model. Both are one class:
they differ only in their `front`, which knows how to call the module and where
its interface comes from.

    stage = PipelineStage(layers, stage_index=1, num_stages=4, device="cpu")
    stage = pipe.build_stage(1, device="cuda")

`stage.submod` may be replaced before the first step, for example by a
DistributedDataParallel, a `fully_shard`ed or a compiled version of itself.

With torch a function given to `register_custom_function` drives the stage: waits for what was
received, calls `forward_one_chunk` or `backward_one_chunk`, hands results to the next stage. Here
the executor moves values, computes losses and scales gradients; so inside such a function the
`..._one_chunk` calls run the executor's own work for that stage and microbatch (`doing`), and the
other calls have nothing left to do. Outside of it the calls that compute are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxpipe.errors import InputError, ScheduleError
from fxpipe.program import Kind
from fxpipe.runtime.stage.executor import ActionContext
from fxpipe.runtime.stage.stage_kind import Front, PipelineStageInfo, TracedFront
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group

if TYPE_CHECKING:
    from fxpipe.graph.pipe import PipeInfo

__all__ = ["PipelineStage", "PipelineStageInfo", "_PipelineStageBase", "build_stage"]


class _PipelineStageBase:
    """What a schedule must know of a stage to list its actions; enough for one that never runs.

    And torch's methods for single microbatches.
    """

    submod: nn.Module
    stage_index: int
    num_stages: int
    device: torch.device
    group: Any = None
    group_rank: Any = 0
    group_size: Any = 1
    has_backward: bool = False
    forward_contexts: OrderedDict[int, Callable[[PipelineStageInfo], Any]]
    _doing: dict[tuple[Kind, int], Callable[[], None]]
    stage_index_to_group_rank: dict[int, int] | None = None  # once a schedule has placed it

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def register_forward_context(
        self, context_factory: Callable[[PipelineStageInfo], Any]
    ) -> RemovableHandle:
        """Call `context_factory(info)` for each forward and run it inside the context returned.

        Raises:
            ScheduleError: a context is registered already; remove it through its handle.
        """
        if self.forward_contexts:
            raise ScheduleError(
                f"stage {self.stage_index} has a forward context; remove it first, by its handle"
            )
        handle = RemovableHandle(self.forward_contexts)
        self.forward_contexts[handle.id] = context_factory
        return handle

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> None:
        """Run the forward of a microbatch, on what the step was passed; inside a function only."""
        self._do(Kind.FORWARD, fwd_chunk_id)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, or its input half; inside a function only."""
        self._do(Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight half of a backward; inside a function only."""
        self._do(Kind.BACKWARD_WEIGHT, bwd_chunk_id)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: gradients are scaled as they are made."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the action REDUCE_GRAD does it."""

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Nothing: stages of one rank hand on by themselves."""

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Nothing: stages of one rank hand on by themselves."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """Nothing to hand on: stages of one rank do it by themselves."""
        return ()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the schedule posts its transfers itself."""
        return []

    get_fwd_send_ops = get_fwd_recv_ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the schedule posts its transfers itself."""
        return []

    get_bwd_send_ops = get_bwd_recv_ops

    def clear_runtime_states(self) -> None:
        """Nothing: no step leaves anything behind."""

    def _do(self, kind: Kind, microbatch: int) -> None:
        run = self._doing.pop((kind, microbatch), None)
        if run is not None:
            return run()
        raise ScheduleError(
            f"stage {self.stage_index} has no {kind.text} of microbatch {microbatch} to do "
            "now: forward_one_chunk, backward_one_chunk and backward_weight_one_chunk compute in "
            "a function given to register_custom_function, for the action that it was given, once"
        )


class PipelineStage(_PipelineStageBase):
    """One stage of a pipeline on one device.

    Args:
        submodule: the module to run.
        stage_index: its place among the `num_stages` stages.
        device: where it runs and where what it receives is put.
        input_args, output_args: example tensors (one microbatch) of what the stage
            takes and returns. Optional: what is missing is inferred, without
            running the module on real data. What is given is checked.
        output_grads: examples of the gradients of what the stage returns. Only the placements
            of DTensors among them matter: gradients come back in these.
        input_grads: taken for torch's sake; the stage before says how gradients come back.
        get_mesh: called as `get_mesh(names, sizes)` for the mesh of a DTensor that the stage
            receives, unless a parameter or an example of the stage has that mesh.
        group: the process group of this pipeline, or a `LocalGroup` to run all
            ranks in this process. Default: all processes, or this one alone.
        dw_builder: called after each backward; the function it returns computes
            weight gradients that the module itself left undone.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: torch.Tensor | tuple[Any, ...] | None = None,
        output_args: torch.Tensor | tuple[Any, ...] | None = None,
        output_grads: torch.Tensor | tuple[Any, ...] | None = None,
        input_grads: torch.Tensor | tuple[Any, ...] | None = None,
        group: dist.ProcessGroup | LocalGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(submodule, nn.Module):
            raise InputError(f"a stage needs a torch.nn.Module, got {type(submodule).__name__}")
        if num_stages < 1 or not 0 <= stage_index < num_stages:
            raise InputError(
                f"stage_index {stage_index} is not one of the {num_stages} stages; "
                f"it must lie between 0 and num_stages - 1"
            )
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.dw_builder = dw_builder
        self.get_mesh = get_mesh
        self.output_grads = _as_tuple(output_grads)
        self.forward_contexts = OrderedDict()
        self._doing = {}
        self.front = Front(_as_tuple(input_args), _as_tuple(output_args))

    @property
    def group_rank(self) -> int:
        """This process's rank in the pipeline's group."""
        group = resolve_group(self.group)
        return 0 if isinstance(group, LocalGroup) else group.rank()

    @property
    def group_size(self) -> int:
        group = resolve_group(self.group)
        return group.num_ranks if isinstance(group, LocalGroup) else group.size()

    def __repr__(self) -> str:
        return (
            f"PipelineStage({self.stage_index} of {self.num_stages}, "
            f"{type(self.submod).__name__}, {self.device})"
        )


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: dist.ProcessGroup | LocalGroup | None = None,
) -> PipelineStage:
    """A stage from a module that `pipeline` cut out, possibly wrapped or altered since."""
    device = torch.device(device)
    if not any(tensor.is_meta for tensor in (*stage_module.parameters(), *stage_module.buffers())):
        stage_module.to(device)
    stage = PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)
    stage.front = TracedFront(pipe_info)
    return stage


@contextmanager
def doing(context: ActionContext, stages: Mapping[int, _PipelineStageBase]) -> Iterator[None]:
    """Inside the block, calls on these stages run the work of this action."""
    works = context.parts or ((context.action, context.default),)
    for action, run in works:
        assert action.microbatch is not None or not action.kind.is_compute
        stages[action.stage]._doing[action.kind, action.microbatch or 0] = run
    try:
        yield
    finally:
        for action, _ in works:
            stages[action.stage]._doing.clear()


def _as_tuple(value: torch.Tensor | tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return value if value is None or isinstance(value, tuple) else (value,)
