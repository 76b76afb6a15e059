"""Let functions written for torch's stages run here: what they call, and what they are handed.

A function given to `register_custom_function` does an action of a schedule in its own way. With
torch it drives the stage: waits for what was received, calls `forward_one_chunk` or
`backward_one_chunk`, hands results to the next stage. Here the executor moves values, computes
losses and scales gradients; so inside such a function the two `..._one_chunk` calls run the
executor's own work for that stage and microbatch, and the other calls have nothing left to do.

Outside of such a function nothing is under way, and the calls that compute are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from fxpipe.errors import ScheduleError
from fxpipe.program import Kind
from fxpipe.program.formats.torch_actions import _Action
from fxpipe.runtime.stage.executor import ActionContext
from fxpipe.runtime.stage.stage_kind import PipelineStageInfo

__all__ = ["ChunkCalls", "CustomFunction", "NothingToReceive", "_PipelineContext", "doing"]

_BACKWARDS = {True: (Kind.BACKWARD,), False: (Kind.BACKWARD_INPUT,)}


@dataclass
class _PipelineContext:
    """What a function given to `register_custom_function` gets beside the action.

    `default()` does the action our way. The lists hold one entry per microbatch, for what this
    rank was passed; `losses` is filled when the step is over.
    """

    schedule_ref: Any
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    losses: list[Any] | None = None
    default: Callable[[], None] = lambda: None


CustomFunction = Callable[[_Action, _PipelineContext], None]


class NothingToReceive(dict[Any, Any]):
    """torch's table of open receives: all that is asked for has come, or will be waited for."""

    def __contains__(self, key: object) -> bool:
        return True

    def pop(self, key: Any, default: Any = None) -> list[Any]:
        return []


class ChunkCalls:
    """torch's methods of a stage for single microbatches."""

    stage_index: int
    forward_contexts: OrderedDict[int, Callable[[PipelineStageInfo], Any]]
    _doing: dict[tuple[Kind, int], Callable[[], None]]

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
        self._do((Kind.FORWARD,), fwd_chunk_id)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, or its input half; inside a function only."""
        self._do(_BACKWARDS[full_backward], bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight half of a backward; inside a function only."""
        self._do((Kind.BACKWARD_WEIGHT,), bwd_chunk_id)

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

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the schedule posts its transfers itself."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the schedule posts its transfers itself."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the schedule posts its transfers itself."""
        return []

    def clear_runtime_states(self) -> None:
        """Nothing: no step leaves anything behind."""

    def _do(self, kinds: tuple[Kind, ...], microbatch: int) -> None:
        for kind in kinds:
            run = self._doing.pop((kind, microbatch), None)
            if run is not None:
                return run()
        raise ScheduleError(
            f"stage {self.stage_index} has no {kinds[0].text} of microbatch {microbatch} to do "
            "now: forward_one_chunk, backward_one_chunk and backward_weight_one_chunk compute in "
            "a function given to register_custom_function, for the action that it was given, once"
        )


@contextmanager
def doing(context: ActionContext, stages: Mapping[int, ChunkCalls]) -> Iterator[None]:
    """Let calls on the stages run the work of this action."""
    works = context.parts or ((context.action, context.default),)
    for action, run in works:
        assert action.microbatch is not None or not action.kind.is_compute
        stages[action.stage]._doing[action.kind, action.microbatch or 0] = run
    try:
        yield
    finally:
        for action, _ in works:
            stages[action.stage]._doing.clear()
