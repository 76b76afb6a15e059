"""Run the stages of this process over the microbatches of a batch, with the other ranks.

`Schedule` is all that schedules share; a class of its own only says which program it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Kind, Program, Timeline, lower
from fxpipe.program.formats.torch_actions import _Action, order_of
from fxpipe.program.generators import get_schedule
from fxpipe.program.play.walk import step_table
from fxpipe.runtime.agree.arguments import (
    TiedStages,
    action_kind,
    count_microbatches,
    count_ranks,
    floating_dtype,
    measured_timeline,
    outstanding_sends,
    running_stages,
    sharing_group,
    stage_list,
    timeout_seconds,
)
from fxpipe.runtime.agree.request import Call, Options
from fxpipe.runtime.newcomer import Newcomer
from fxpipe.runtime.norms import clip
from fxpipe.runtime.session import Session
from fxpipe.runtime.share import check_alike, first_known, gather
from fxpipe.runtime.stage.executor import ActionContext, Hooks
from fxpipe.runtime.wire.local_group import LocalGroup
from fxpipe.stage import PipelineStage

__all__ = ["FIXED", "Schedule", "check_overrides"]


class Schedule:
    """Runs the stages of this process, together with the other ranks.

    Args:
        stages: this rank's stage, or stages in any order.
        n_microbatches: into how many parts a batch is split.
        loss_fn: called on the last stage as `loss_fn(output, target)` for each
            microbatch; returns a scalar or `(sum, weight)`. Without it `step` runs
            forwards only.
        args_chunk_spec, kwargs_chunk_spec: how inputs are split; see `fxpipe.microbatch`.
        output_merge_spec: how the outputs of microbatches are merged.
        scale_grads: average over the batch (the default) or sum over microbatches.
        timeout: seconds after which a rank that waits gives up and says for whom;
            default 1800, or the environment variable FXPIPE_TIMEOUT.
        receives: "early" posts receives when the sender sends, "late" just before use.
        boundary_dtype: what wider floating-point values travel as between ranks, such as
            torch.bfloat16: half the bytes, and gradients rounded accordingly.
        tp_group: ranks that hold the same values at boundaries, as those of a tensor-parallel group
            mostly do: each sends its share of them, and the receivers gather.
        max_unsharded: how many `fully_shard`ed stages a rank holds unsharded at once.
        offload: move what a forward keeps to host memory where its backward is more than so many
            compute actions of the rank away; at least 2.
        unshard_lookahead: of how many of its next stages a rank begins to gather parameters:
            "full" of all it may hold, "auto" of its rank + 2, or a number for each rank.
        max_outstanding_sends: how many sent messages a rank keeps; before the next one it waits
            for the oldest. Default: as many as are on their way.
        tied: parameters that hand-written stages share, as lists of (stage, name).
    """

    schedule_name: ClassVar[str] = ""

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        timeout: float | None = None,
        receives: str = "early",
        boundary_dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
        max_unsharded: int = 3,
        offload: int | None = None,
        unshard_lookahead: str | tuple[int, ...] = "full",
        max_outstanding_sends: int | None = None,
        tied: Iterable[Iterable[tuple[int, str]]] = (),
    ) -> None:
        self._stages = stage_list(stages)
        for one in (self, *self._stages):
            check_overrides(type(one))
        self._n_microbatches = self.n_microbatches = count_microbatches(n_microbatches)
        self._num_stages = self._stages[0].num_stages
        self._hooks = Hooks({}, {}, {})
        self._options = Options(
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            timeout=timeout_seconds(timeout),
            receives=receives,
            boundary_dtype=floating_dtype(boundary_dtype),
            tp_group=sharing_group(tp_group, self._stages[0].group),
            max_unsharded=max_unsharded,
            offload=offload,
            unshard_lookahead=unshard_lookahead,
            max_outstanding_sends=outstanding_sends(max_outstanding_sends, receives),
            tied=tuple(TiedStages(tuple(locations)) for locations in tied),
        )
        self._program: Program | None = None
        self._made_session: Session | None = None
        self._longer: dict[int, Schedule] = {}  # for streams, by the number of batches
        self._newcomer = Newcomer(self._stages[0].group)
        if self._has_program():
            self._program = self._begin()
        for stage in self._stages:
            stage.has_backward = loss_fn is not None
        self.loss: torch.Tensor | None = None
        self.aux_loss: torch.Tensor | None = None
        self._timeline: Timeline | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and "_timeline" in vars(self):
            raise ScheduleError(
                f"{name} of a schedule is fixed when it is made, since its plans rest on it: "
                f"make a new {type(self).__name__}"
            )
        super().__setattr__(name, value)

    def _has_program(self) -> bool:
        """Whether the program can be made now; a class of the user's own may name it later."""
        return True

    def _begin(self) -> Program:
        program = self._make_program(count_ranks(self._stages, self.schedule_name))
        self._made_session = None
        for stage in self._stages:
            stage.stage_index_to_group_rank = dict(enumerate(program.placement.stage_to_rank))
        return program

    @property
    def program(self) -> Program:
        """Which rank computes what, in which order."""
        if self._program is None:
            self._program = self._begin()
        return self._program

    @property
    def _session(self) -> Session:
        if self._made_session is None:
            group, program = self._stages[0].group, self.program
            if group is None and not torch.distributed.is_initialized():
                group = LocalGroup(program.num_ranks)
            self._made_session = Session(
                running_stages(self._stages), group, program, self._options, self._hooks,
                self._newcomer,
            )  # fmt: skip
        return self._made_session

    @property
    def scale_grads(self) -> bool:
        return self._options.scale_grads

    @property
    def _loss_fn(self) -> Callable[..., Any] | None:
        return self._options.loss_fn

    @property
    def pipeline_order(self) -> dict[int, list[_Action | None]]:
        """The program in torch's words: for each rank its actions, None where it waits.

        Pairs take longer than a step, so an order with pairs lists the actions alone.
        """
        program = self.program
        has_pairs = any(action.parts for row in program.ranks for action in row)
        return order_of(program.ranks if has_pairs else step_table(program))

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[_Action | None]]:
        """The same with transfers: of the latest step, or of stages that form a chain."""
        session = self._made_session
        if session is not None and session.plan is not None:
            return order_of(self.lowered().ranks)
        options = self._options
        lowered = lower(
            self.program, receives=options.receives, reduce_grad=True,
            max_unsharded=options.max_unsharded,
            unshard_lookahead=options.lookahead(self.program.num_ranks),
        )  # fmt: skip
        return order_of(lowered.ranks)

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        return dict(enumerate(self.program.placement.stage_to_rank))

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Train on one batch: forward, loss and backward of every microbatch.

        The same call may be made on every rank, each takes what it needs; or inputs are
        passed where the first stage is and the target where the last is. Gradients are
        added to `.grad`. `arg_mbs`, `kwarg_mbs` and `target_mbs` are inputs that are split
        already, one entry per microbatch. With `finalize_gradients=False` data-parallel replicas
        do not reduce gradients in this step: the next step without it reduces the sum of all.
        Until then `fully_shard`ed stages keep it outside `.grad`; zero_grad() does not see it.

        Returns:
            the merged output on the rank of the last stage (unless
            `return_outputs=False`), None elsewhere. `losses` is filled there with one
            scalar per microbatch; `self.loss` is the loss of the batch.
        """
        presplit = (arg_mbs, kwarg_mbs, target_mbs)
        more = (return_outputs, losses, presplit, bool(finalize_gradients))
        return self._run(Call(True, args, kwargs, target, loss_kwargs or {}, *more))

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards only, without gradients; with a target also the loss.

        Modules keep the mode that `train()` or `eval()` gave them.
        """
        presplit = (arg_mbs, kwarg_mbs, target_mbs)
        more = (return_outputs, losses, presplit)
        with torch.no_grad():
            return self._run(Call(False, args, kwargs, target, loss_kwargs or {}, *more))

    def eval_stream(self, batches: Iterable[Any], *, at_once: int = 8) -> Iterator[Any]:
        """Run forwards of many batches without draining the pipeline between them.

        Go through the result on every rank: it has one output per batch on the rank of the last
        stage and None elsewhere. A batch is a tensor, a tuple, or a dict of keywords; `()` on a
        rank that has no inputs. `at_once` batches are read, run as one call, and handed out.
        """
        from fxpipe.schedules.rounds import eval_stream  # which makes schedules

        return eval_stream(self, batches, at_once)

    @property
    def grad_scale(self) -> float:
        """A factor of the gradients of the following steps, but not of the reported loss.

        For accumulation and gradient scalers. Set the same on every rank.
        """
        return self._session.grad_scale

    @grad_scale.setter
    def grad_scale(self, factor: float) -> None:
        self._session.grad_scale = float(factor)

    def shared_loss(self) -> torch.Tensor:
        """The loss of the latest call, on every rank. Call it on every rank.

        One small exchange; on an accelerator it waits for the loss to be computed.
        """
        said = self.gather("shared_loss", None if self.loss is None else float(self.loss))
        found = first_known(said)
        return torch.tensor(found) if self.loss is None else self.loss

    def gather(self, call: str, value: Any) -> list[Any]:
        """What each rank says, on every rank. Call it on every rank."""
        return gather(self._session, call, value)

    def check_alike(
        self, call: str, what: str, value: Any, problem: BaseException | None = None
    ) -> None:
        """Raise on all ranks if they have different values. Call it on every rank."""
        check_alike(self._session, call, what, value, problem)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the gradient norm of the whole model, over all stages of all ranks.

        Call it on every rank, after `step`. Tied parameters count once. Returns the norm
        before clipping, the same on all ranks.
        """
        return clip(self._session, max_norm, norm_type, error_if_nonfinite)

    def before(self, kind: str | Kind, callback: Callable[[Action], None]) -> None:
        """Call `callback(action)` before every action of a kind, such as "F" or "SEND_F"."""
        self._hooks.before.setdefault(action_kind(kind), []).append(callback)
        self._hooks.version += 1

    def after(self, kind: str | Kind, callback: Callable[[Action], None]) -> None:
        """Call `callback(action)` after every action of a kind."""
        self._hooks.after.setdefault(action_kind(kind), []).append(callback)
        self._hooks.version += 1

    def remove_hook(self, kind: str | Kind, callback: Callable[[Action], None]) -> None:
        """Take back what `before` or `after` was given."""
        key = action_kind(kind)
        for hooks in (self._hooks.before, self._hooks.after):
            hooks[key] = [hook for hook in hooks.get(key, []) if hook != callback]
        self._hooks.version += 1

    def replace(self, kind: str | Kind, function: Callable[[ActionContext], None]) -> None:
        """Let `function(context)` do the actions of a kind; `context.default()` is our way."""
        self._hooks.instead[action_kind(kind)] = function
        self._hooks.version += 1

    def record_timeline(self, enabled: bool = True) -> None:
        """Measure the following steps; see `timeline`."""
        self._session.records_spans = enabled

    @property
    def timeline(self) -> Timeline:
        """When each action of the latest recorded step ran, on all ranks."""
        if self._timeline is None:
            raise ScheduleError("no step was recorded: call record_timeline() before the step")
        return self._timeline

    def lowered(self) -> Program:
        """The program of the latest step as it ran, with its transfers."""
        plan = self._session.plan
        if plan is None:
            raise ScheduleError("the program is lowered at the first step, which is still to come")
        return plan.program

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages of this process."""
        return tuple(self._stages)

    def __repr__(self) -> str:
        stages = [stage.stage_index for stage in self._stages]
        return (
            f"{type(self).__name__}(stages {stages} of {self.program.num_stages}, "
            f"{self.n_microbatches} microbatches, {self.program.num_ranks} ranks)"
        )

    def _make_program(self, num_ranks: int) -> Program:
        if not self.schedule_name:
            raise ScheduleError(
                f"{type(self).__name__} is not a schedule itself; use one of its kind"
            )
        info = get_schedule(self.schedule_name)
        return info(num_ranks, self._num_stages, self._n_microbatches)

    def _run(self, call: Call) -> Any:
        outcome = self._session.step(call)
        self.loss, self.aux_loss = outcome.loss, outcome.aux
        if call.losses is not None:
            call.losses[:] = outcome.losses
        if outcome.spans is not None:
            self._timeline = measured_timeline(self.program.num_ranks, outcome.spans)
        return outcome.output


# Attributes that torch reads anew in each step.
FIXED = frozenset(["_has_backward", "_loss_fn", "_n_microbatches", "n_microbatches", "scale_grads"])
# Methods that torch's engine calls, and ours does not; what to use instead.
_NEVER_CALLED = {
    "_compute_loss": "give the schedule a loss_fn",
    "_maybe_compute_loss": "give the schedule a loss_fn",
    "_step_microbatches": "set pipeline_order, or use before() and after()",
    "_split_inputs": "use args_chunk_spec and kwargs_chunk_spec",
    "_merge_outputs": "use output_merge_spec",
    "forward_one_chunk": "use register_custom_function",
    "backward_one_chunk": "use register_custom_function",
    "backward_weight_one_chunk": "use register_custom_function",
}


def check_overrides(kind: type) -> None:
    """Raise ScheduleError if a class of the user's overrides a method that is never called."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == "fxpipe":
            continue
        for name, instead in _NEVER_CALLED.items():
            if name in vars(one):
                raise ScheduleError(
                    f"{one.__qualname__} overrides {name}, a part of torch's own engine that is "
                    f"never called here: {instead}"
                )
