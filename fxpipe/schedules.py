"""The schedules: what runs a pipeline's stages over the microbatches of a batch.

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
    schedule.step(x, target=y)      # on every rank; then optimizer.step()
    output = schedule.eval(x)

Each class is a name for a program (see `fxpipe.program`); all share one executor.
With R ranks, rank r holds the stages r, r + R, ... (looped schedules) or r and
2R - 1 - r (V schedules), given in this order. With a `LocalGroup` one process holds
all of them.

Gradients are those of the plain model on the whole batch. A scalar loss is taken
for a mean over its microbatch and weighted by rows; `scale_grads=False` sums
instead. A loss function may return `(sum, weight)` for a weighted mean over the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Kind, Program, Timeline, validate
from fxpipe.program.generators import SCHEDULES, ScheduleInfo, get_schedule
from fxpipe.runtime.agree.arguments import (
    TiedStages,
    action_kind,
    count_microbatches,
    count_ranks,
    measured_timeline,
    stage_list,
    timeout_seconds,
)
from fxpipe.runtime.agree.request import Call, Options
from fxpipe.runtime.norms import clip
from fxpipe.runtime.session import Session
from fxpipe.runtime.stage.executor import ActionContext, Hooks
from fxpipe.runtime.wire.local_group import LocalGroup
from fxpipe.stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule",
    "ScheduleFromProgram",
    "get_schedule_class",
    *(f"Schedule{info.name}" for info in SCHEDULES.values() if info.trains),
]


class Schedule:
    """Runs the stages of this process, together with the other ranks.

    Args:
        stages: this rank's stage, or stages in increasing order.
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
        max_unsharded: how many `fully_shard`ed stages a rank holds unsharded at once.
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
        max_unsharded: int = 3,
        tied: Iterable[Iterable[tuple[int, str]]] = (),
    ) -> None:
        self._stages = stage_list(stages)
        self.n_microbatches = count_microbatches(n_microbatches)
        self._hooks = Hooks({}, {}, {})
        self._options = Options(
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            timeout=timeout_seconds(timeout),
            receives=receives,
            max_unsharded=max_unsharded,
            tied=tuple(TiedStages(tuple(locations)) for locations in tied),
        )
        if self._has_program():
            self._begin()
        self.loss: torch.Tensor | None = None
        self.aux_loss: torch.Tensor | None = None
        self._timeline: Timeline | None = None

    def _has_program(self) -> bool:
        """Whether the program can be made now; a class of the user's own may name it later."""
        return True

    def _begin(self) -> None:
        group = self._stages[0].group
        self.program = self._make_program(count_ranks(group, self._stages, self.schedule_name))
        if group is None and not torch.distributed.is_initialized():
            group = LocalGroup(self.program.num_ranks)
        self._session = Session(self._stages, group, self.program, self._options, self._hooks)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train on one batch: forward, loss and backward of every microbatch.

        The same call may be made on every rank, each takes what it needs; or inputs are
        passed where the first stage is and the target where the last is. Gradients are
        added to `.grad`.

        Returns:
            the merged output on the rank of the last stage (unless
            `return_outputs=False`), None elsewhere. `losses` is filled there with one
            scalar per microbatch; `self.loss` is the loss of the batch.
        """
        return self._run(True, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards only, without gradients; with a target also the loss.

        Modules keep the mode that `train()` or `eval()` gave them.
        """
        with torch.no_grad():
            return self._run(False, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the gradient norm of the whole model, over all stages of all ranks.

        Call it on every rank, after `step`. Tied parameters count once. Returns the norm
        before clipping, the same on all ranks.
        """
        return torch.tensor(clip(self._session, max_norm, norm_type, error_if_nonfinite))

    def before(self, kind: str | Kind, callback: Callable[[Action], None]) -> None:
        """Call `callback(action)` before every action of a kind, such as "F" or "SEND_F"."""
        self._hooks.before.setdefault(action_kind(kind), []).append(callback)
        self._hooks.version += 1

    def after(self, kind: str | Kind, callback: Callable[[Action], None]) -> None:
        """Call `callback(action)` after every action of a kind."""
        self._hooks.after.setdefault(action_kind(kind), []).append(callback)
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
        return info(num_ranks, self._stages[0].num_stages, self.n_microbatches)

    def _run(
        self,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[torch.Tensor] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:
        call = Call(training, args, kwargs, target, loss_kwargs or {}, return_outputs, losses)
        outcome = self._session.step(call)
        self.loss, self.aux_loss = outcome.loss, outcome.aux
        if losses is not None:
            losses[:] = outcome.losses
        if outcome.spans is not None:
            self._timeline = measured_timeline(self.program.num_ranks, outcome.spans)
        return outcome.output


class PipelineScheduleSingle(Schedule):
    """Schedules with one stage per rank; see `Schedule` for the arguments."""

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        chunking = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stage, n_microbatches, loss_fn, *chunking, scale_grads, **options)


class PipelineScheduleMulti(Schedule):
    """Schedules with several stages per rank; see `Schedule` for the arguments.

    A class of your own sets `self.pipeline_order = {rank: [action, None, ...]}` before or after
    this constructor: for each rank its compute actions, as objects or as text ("0F0"), None
    for an idle step. `use_full_backward` and `backward_requires_autograd` mean nothing here.
    """

    pipeline_order: Mapping[int, Sequence[Any]] | None = None

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **options: Any,
    ) -> None:
        chunking = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, *chunking, scale_grads, **options)

    def _has_program(self) -> bool:
        is_own = not self.schedule_name and type(self) is not PipelineScheduleMulti
        return not is_own or self.pipeline_order is not None

    def __getattr__(self, name: str) -> Any:
        # The program of a class that has set `pipeline_order` since.
        if name in ("program", "_session") and vars(self).get("pipeline_order") is not None:
            self._begin()
            return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _make_program(self, num_ranks: int) -> Program:
        if self.schedule_name or self.pipeline_order is None:
            return super()._make_program(num_ranks)
        rows = [[str(a) for a in self.pipeline_order[r] if a is not None] for r in range(num_ranks)]
        program = Program.from_csv("\n".join(map(",".join, rows)), name=type(self).__name__)
        wanted = (num_ranks, self._stages[0].num_stages, self.n_microbatches)
        found = (program.num_ranks, program.num_stages, program.num_microbatches)
        if found != wanted:
            raise ScheduleError(
                "pipeline_order is for {} ranks, {} stages and {} microbatches, "
                "the schedule has {}, {} and {}".format(*found, *wanted)
            )
        validate(program)
        return program


class _NamedMulti(PipelineScheduleMulti):
    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        if defer_pp_recv:
            options.setdefault("receives", "late")
        chunking = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(
            stages, n_microbatches, loss_fn, *chunking, scale_grads=scale_grads, **options
        )


class ScheduleLoopedBFS(_NamedMulti):
    """All microbatches through one stage of a rank before the next."""

    schedule_name = "LoopedBFS"

    # torch gives this one alone no chunk specs by position.
    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        merging = {"output_merge_spec": output_merge_spec, "scale_grads": scale_grads}
        super().__init__(
            stages, n_microbatches, loss_fn, defer_pp_recv=defer_pp_recv, **merging, **options
        )


def _class_of(info: ScheduleInfo) -> type[Schedule]:
    """The class of a schedule in the registry: its own if it has one, else one made for it."""
    name = f"Schedule{info.name}"
    base = PipelineScheduleSingle if info.stages_per_rank == (1, 1) else _NamedMulti
    doc = f"{info.description}\n\n    {info.when_to_use}\n    "
    fields = {"schedule_name": info.name, "__doc__": doc, "__module__": __name__}
    return globals().get(name) or type(name, (base,), fields)


_CLASSES = {info.name: _class_of(info) for info in SCHEDULES.values() if info.trains}

if TYPE_CHECKING:  # so that type checkers know the names, too

    class ScheduleGPipe(PipelineScheduleSingle):
        """See the page on schedules."""

    class Schedule1F1B(PipelineScheduleSingle):
        """See the page on schedules."""

    class ScheduleZBH1(PipelineScheduleSingle):
        """See the page on schedules."""

    class ScheduleZBH2(PipelineScheduleSingle):
        """See the page on schedules."""

    class ScheduleInterleaved1F1B(_NamedMulti):
        """See the page on schedules."""

    class ScheduleInterleavedZeroBubble(_NamedMulti):
        """See the page on schedules."""

    class ScheduleZBVZeroBubble(_NamedMulti):
        """See the page on schedules."""

    class ScheduleDualPipeV(_NamedMulti):
        """See the page on schedules."""

    class ScheduleDualPipeVDown(_NamedMulti):
        """See the page on schedules."""

    class ScheduleVHalf(_NamedMulti):
        """See the page on schedules."""

    class ScheduleVMin(_NamedMulti):
        """See the page on schedules."""

    class ScheduleWave(_NamedMulti):
        """See the page on schedules."""

else:
    globals().update({made.__name__: made for made in _CLASSES.values()})


class ScheduleFromProgram(Schedule):
    """Any valid program, made by hand, by a search, or read from a CSV file.

    schedule = ScheduleFromProgram(stages, "my_schedule.csv", loss_fn=loss)
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        program: Program | str | Path,
        loss_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(program, Program):
            program = Program.from_csv(Path(program).read_text())
        if program.is_lowered:
            raise ScheduleError(
                "the program has transfers already; give the compute-only program, "
                "fxpipe adds the transfers for the stages' own edges"
            )
        validate(program)
        self._given = program
        super().__init__(stages, program.num_microbatches, loss_fn, **options)

    def _make_program(self, num_ranks: int) -> Program:
        program, num_stages = self._given, self._stages[0].num_stages
        if (program.num_ranks, program.num_stages) != (num_ranks, num_stages):
            raise ScheduleError(
                f"the program is for {program.num_ranks} ranks and {program.num_stages} stages, "
                f"the pipeline has {num_ranks} ranks and {num_stages} stages"
            )
        return program


def get_schedule_class(schedule_name: str) -> type[Schedule]:
    """The class of a schedule by its name, in any case: "1F1B", "zbvzerobubble", ...

    Raises:
        ScheduleError: a ValueError that lists the known names.
    """
    plain = str(schedule_name).lower().removeprefix("schedule")
    for other in (PipelineScheduleSingle, PipelineScheduleMulti, ScheduleFromProgram):
        if other.__name__.lower().removeprefix("schedule") == plain:
            return other
    info = get_schedule(schedule_name)
    if not info.trains:
        raise ScheduleError(
            f"{info.name} has no class of its own: every schedule does this in eval(). "
            f"Classes: {', '.join(_CLASSES)}"
        )
    return _CLASSES[info.name]
