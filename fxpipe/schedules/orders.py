"""Schedules with one or several stages per rank, and orders that users write themselves.

The base classes of all named schedules. `PipelineScheduleMulti` also reads and writes a program in
torch's words: as `pipeline_order`, as CSV files, and in functions that do an action themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.program import Program, validate
from fxpipe.program.formats.text import rows_of_csv, write_csv
from fxpipe.program.formats.torch_actions import (
    _Action,
    _ComputationType,
    computes_of,
    program_of_order,
)
from fxpipe.runtime.agree.arguments import count_ranks
from fxpipe.runtime.stage.executor import ActionContext
from fxpipe.schedules.base import Schedule
from fxpipe.stage import PipelineStage, doing

__all__ = ["PipelineScheduleMulti", "PipelineScheduleSingle", "_PipelineContext"]


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
        self._stage = self._stages[0]


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


class _NothingToReceive(dict[Any, Any]):
    """torch's table of open receives: all that is asked for has come, or will be waited for."""

    def __contains__(self, key: object) -> bool:
        return True

    def pop(self, key: Any, default: Any = None) -> list[Any]:
        return []


class _Filled(dict[int, Sequence[Any]]):
    """A `pipeline_order` after its program was made: it refuses changes."""

    def __setitem__(self, rank: int, actions: Sequence[Any]) -> None:
        raise ScheduleError(
            "the program has been made from pipeline_order: to change it, set the whole dict"
        )


class PipelineScheduleMulti(Schedule):
    """Schedules with several stages per rank; see `Schedule` for the arguments.

    A class of your own sets `self.pipeline_order = {rank: [action, None, ...]}` before or after
    this constructor: for each rank its compute actions, as objects or as text ("0F0"), None
    for an idle step; or `self.pipeline_order_with_comms`, of which the compute is taken.
    `use_full_backward` and `backward_requires_autograd` mean nothing here.
    """

    _order: dict[int, Sequence[Any]] | None = None

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
        self.use_full_backward = use_full_backward
        self.pp_group_size = count_ranks(self._stages, self.schedule_name)
        self.rank = self._stages[0].group_rank
        self.fwd_recv_ops, self.bwd_recv_ops = _NothingToReceive(), _NothingToReceive()
        self.backward_counter: Counter[int] = Counter()

    @property
    def pipeline_order(self) -> dict[int, list[_Action | None]]:
        """What was set, or the program in torch's words.

        A class of your own may also fill the dict rank by rank, until its program is made.
        """
        if self._order is None and not self.schedule_name:
            self._order = {}
        if self._order is None:
            return super().pipeline_order
        # Nobody fills in what would have no effect.
        return self._order if self._program is None else _Filled(self._order)  # type: ignore[return-value]

    @pipeline_order.setter
    def pipeline_order(self, order: Mapping[int, Sequence[Any]]) -> None:
        self._order, self._program, self._made_session = dict(order), None, None

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[_Action | None]]:
        """The program in torch's words with transfers; see `Schedule`."""
        return super().pipeline_order_with_comms

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: Mapping[int, Sequence[Any]]) -> None:
        self.pipeline_order = {rank: list(computes_of(row)) for rank, row in order.items()}

    def register_custom_function(
        self,
        computation_type: _ComputationType,
        custom_function: Callable[[_Action, _PipelineContext], None],
    ) -> None:
        """Let `custom_function(action, context)` do the actions of a kind, as torch names it.

        In it the stages' `forward_one_chunk` and `backward_one_chunk`, or `context.default()`,
        do our work for the action; see `fxpipe.stage`.
        """

        def run(context: ActionContext) -> None:
            step = self._session.run
            assert step is not None
            given = (step.chunks.args, step.chunks.kwargs, step.step.targets)
            view = _PipelineContext(self, *given, default=context.default)
            with doing(context, self._session.stages):  # type: ignore[arg-type]
                custom_function(_Action.of(context.action), view)

        self.replace(computation_type.kind, run)

    def _validate_and_set_stage_mapping(self, order: Mapping[int, Sequence[Any]]) -> None:
        """Take an order as `pipeline_order`, and refuse it now if it cannot run."""
        self.pipeline_order = order
        self._program = self._begin()

    def _prepare_schedule_with_comms(
        self, actions: Mapping[int, Sequence[Any]], format: str = "compute_only"
    ) -> None:
        """Take an order, compute-only or with communication, which is then added anew."""
        if format not in ("compute_only", "compute_comms"):
            raise ScheduleError(f"format must be compute_only or compute_comms, got {format!r}")
        rows = {rank: list(computes_of(row)) for rank, row in actions.items()}
        self._validate_and_set_stage_mapping(rows)

    def _load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Take the order of a file that torch, or `_dump_csv`, wrote."""
        rows = rows_of_csv(Path(filename).read_text())
        self._prepare_schedule_with_comms(dict(enumerate(rows)), format)

    def _dump_csv(self, filename: str | Path, format: str = "compute_comms") -> None:
        """Write the order to a file, with or without communication, as torch does."""
        is_whole = format == "compute_comms"
        order = self.pipeline_order_with_comms if is_whole else self.pipeline_order
        cells = [["" if a is None else str(a) for a in order[rank]] for rank in sorted(order)]
        Path(filename).write_text(write_csv(cells))

    def _assert_unsharded(self, stage: Any) -> None:
        """Nothing: parameters are gathered before an action starts."""

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: int) -> None:
        """Nothing: the forward of the last stage computes its loss."""

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> None:
        """Nothing: the backward of the last stage has its loss."""

    def _has_program(self) -> bool:
        return bool(self.schedule_name or self._order)

    def _make_program(self, num_ranks: int) -> Program:
        if not self._order:
            return super()._make_program(num_ranks)
        program = program_of_order(self._order, name=type(self).__name__)
        wanted = (num_ranks, self._num_stages, self.n_microbatches)
        found = (program.num_ranks, program.num_stages, program.num_microbatches)
        if found != wanted:
            raise ScheduleError(
                "pipeline_order is for {} ranks, {} stages and {} microbatches, "
                "the schedule has {}, {} and {}".format(*found, *wanted)
            )
        validate(program)
        return program
