"""The schedules by their names: a class for each, and for programs of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ScheduleError
from fxpipe.program import Program, validate
from fxpipe.program.generators import SCHEDULES, ScheduleInfo, get_schedule
from fxpipe.schedules.base import Schedule
from fxpipe.schedules.orders import PipelineScheduleMulti, PipelineScheduleSingle
from fxpipe.stage import PipelineStage

__all__ = [
    "ScheduleFromProgram",
    "get_schedule_class",
    *(f"Schedule{info.name}" for info in SCHEDULES.values() if info.trains),
]


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
        max_active_stages: int = 3,
        unshard_lookahead: str | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **options: Any,
    ) -> None:
        if defer_pp_recv:
            options.setdefault("receives", "late")
        options.setdefault("max_unsharded", max_active_stages)
        options |= {
            "unshard_lookahead": unshard_lookahead,
            "max_outstanding_sends": max_outstanding_sends,
        }
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
        max_active_stages: int = 3,
        unshard_lookahead: str | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **options: Any,
    ) -> None:
        taken = {"output_merge_spec": output_merge_spec, "scale_grads": scale_grads}
        options |= {
            "defer_pp_recv": defer_pp_recv,
            "max_active_stages": max_active_stages,
            "unshard_lookahead": unshard_lookahead,
            "max_outstanding_sends": max_outstanding_sends,
        }
        super().__init__(stages, n_microbatches, loss_fn, **taken, **options)


def _class_of(info: ScheduleInfo) -> type[Schedule]:
    """The class of a schedule in the registry: its own if it has one, else one made for it."""
    name = f"Schedule{info.name}"
    base = PipelineScheduleSingle if info.stages_per_rank == (1, 1) else _NamedMulti
    doc = f"{info.description}\n\n    {info.when_to_use}\n    "
    fields = {"schedule_name": info.name, "__doc__": doc, "__module__": "fxpipe.schedules"}
    return globals().get(name) or type(name, (base,), fields)


_CLASSES = {info.name: _class_of(info) for info in SCHEDULES.values() if info.trains}

if TYPE_CHECKING:  # so that type checkers, and the reference by these docstrings, know the names

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
