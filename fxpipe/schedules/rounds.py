"""Make more of a schedule: rounds through its stages, or a stream of batches.

**Rounds.** What the last stage chooses is the first stage's next input.

In:  a schedule of traced stages that has run once, and a `Feed`.
Out: a schedule for `count` rounds in one call.

Stage s of round k is stage k * num_stages + s of a longer pipeline, on the rank and with the module
of s. An edge leads from the last stage of a round to each stage of the next that takes tokens. So
the order, the messages and what happens to failures are those of any pipeline. With as many
microbatches as ranks no rank waits between two rounds.

**A stream.** Several batches run as the microbatches of one call, so the pipeline is not drained
between them: with p ranks, m microbatches and b batches per call (p - 1) / (b m + p - 1) of the
time is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.program import Action, Placement, Program
from fxpipe.program.generators import forward_only_on
from fxpipe.runtime.agree.request import Call, split_call
from fxpipe.runtime.stage.boundary import Boundary, PortShape, Skeleton, bind_traced
from fxpipe.runtime.stage.stage_kind import PipelineStageInfo, Stage, TracedFront
from fxpipe.schedules.base import Schedule
from fxpipe.schedules.named import ScheduleFromProgram
from fxpipe.stage import PipelineStage

__all__ = ["Feed", "arguments", "can_go_round", "eval_stream", "has_hooks", "rounds_of"]


class Feed(Protocol):
    """What goes into a round, and what comes out of it."""

    input_name: str

    def shapes(self, rows: int, length: int, number: int) -> dict[str, torch.Tensor]:
        """Tensors shaped as a round's inputs are, if those of round 0 are `rows` x `length`."""

    def inputs(self, microbatch: int, number: int, tokens: Any) -> dict[str, torch.Tensor]:
        """The inputs of a round; `tokens` are None for a stage that does not take them."""

    def chosen(self, microbatch: int) -> torch.Tensor:
        """The newest token of each row, after the last stage has run."""


def can_go_round(schedule: Schedule) -> bool:
    """Whether this rank can make rounds of the latest call of a schedule."""
    plan = schedule._session.plan
    if plan is None or not isinstance(schedule.stages[0].front, TracedFront):
        return False
    ports = (port for ports in plan.executors[0].boundaries[0].ports.values() for port in ports)
    return all(port.layout is None for port in ports)


def has_hooks(schedule: Schedule) -> bool:
    """Whether a user's functions stand around, or instead of, actions of a schedule."""
    hooks = schedule._hooks
    return any(any(some.values()) for some in (hooks.before, hooks.after, hooks.instead))


def rounds_of(schedule: Schedule, count: int, feed: Feed) -> Schedule:
    """A schedule whose `eval` sends every microbatch `count` times through the stages.

    Two ranks, two microbatches, three rounds; stages 2 and 3 are 0 and 1 again:

        rank 0: 0F0 0F1 2F0 2F1 4F0 4F1
        rank 1: 1F0 1F1 3F0 3F1 5F0 5F1
    """
    front = _RoundsFront(schedule, count, feed)
    own = schedule.program.placement
    placement = Placement(own.num_ranks, own.stage_to_rank * count)
    stages = [
        _again(stage, number, count, front) for number in range(count) for stage in schedule.stages
    ]
    program = forward_only_on(placement, schedule.n_microbatches, rounds=count)
    made = _longer(schedule, count, stages, program)
    made.before("F", front.begin)
    return made


def _longer(
    schedule: Schedule,
    count: int,
    stages: Sequence[PipelineStage],
    program: Program,
    **more: Any,
) -> Schedule:
    """A schedule for a program of `count` times the length, with the other's options."""
    options = schedule._options
    return ScheduleFromProgram(
        stages,
        program,
        timeout=options.timeout * count,
        receives=options.receives,
        boundary_dtype=options.boundary_dtype,
        tp_group=options.tp_group,
        max_unsharded=options.max_unsharded,
        unshard_lookahead=options.unshard_lookahead,
        max_outstanding_sends=options.max_outstanding_sends,
        **more,
    )


def _again(stage: PipelineStage, number: int, count: int, front: TracedFront) -> PipelineStage:
    index = number * stage.num_stages + stage.stage_index
    made = PipelineStage(
        stage.submod, index, count * stage.num_stages, stage.device, group=stage.group
    )
    made.front = front
    for key, make in stage.forward_contexts.items():
        made.forward_contexts[key] = _for_stage(stage.stage_index, make)
    return made


def _for_stage(
    index: int, make: Callable[[PipelineStageInfo], Any]
) -> Callable[[PipelineStageInfo], Any]:
    return lambda info: make(replace(info, stage_index=index))


class _RoundsFront(TracedFront):
    """The front of all stages of all rounds."""

    def __init__(self, schedule: Schedule, count: int, feed: Feed) -> None:
        first = schedule.stages[0].front
        assert isinstance(first, TracedFront)
        super().__init__(first.info)
        self._count, self._feed = count, feed
        self._num_stages = len(self.info.interfaces)
        plan = schedule._session.plan
        assert plan is not None
        # As they were agreed on: a model may have been cast after its trace.
        found = plan.executors[0].boundaries[0].ports
        self._dtypes = {(*at, p.name): p.dtype for at, ports in found.items() for p in ports}
        self._now: Action | None = None

    def begin(self, action: Action) -> None:
        """Note which forward is about to run."""
        self._now = action

    def _takes_tokens(self, stage: int) -> bool:
        return self._feed.input_name in self.info.interfaces[stage].model_inputs

    def edges(self, num_stages: int) -> list[tuple[int, int]]:
        inner = super().edges(self._num_stages)
        starts = range(0, num_stages, self._num_stages)
        within = [(begin + source, begin + target) for begin in starts for source, target in inner]
        takers = [stage for stage in range(self._num_stages) if self._takes_tokens(stage)]
        return within + [(begin - 1, begin + stage) for begin in starts[1:] for stage in takers]

    @property
    def tied(self) -> Sequence[Any]:
        return ()  # the schedule that this is made of has seen to them

    def name_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, dict(kwargs)

    def takes(self, stage: Stage) -> frozenset[str] | None:
        return frozenset(self.needs(stage.stage_index))

    def needs(self, stage: int) -> Sequence[str]:
        is_fed = stage < self._num_stages and self._takes_tokens(stage)
        return (self._feed.input_name,) if is_fed else ()

    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        rows, length = kwargs[self._feed.input_name].shape
        return (("rows", rows), ("length", length))

    def boundaries(
        self, sizes: Sequence[Any], wants_gradient: Sequence[bool]
    ) -> tuple[Boundary, ...] | None:
        return tuple(self._boundary(**dict(values)) for values in sizes)

    def _boundary(self, rows: int, length: int) -> Boundary:
        num_stages, interfaces = self._num_stages, self.info.interfaces
        ports = {}
        for number in range(self._count):
            symbols = self.info.bind_inputs((), self._feed.shapes(rows, length, number))
            one = bind_traced(interfaces, symbols, [False] * num_stages)
            for at, found in one.ports.items():
                moved = (at[0] + number * num_stages, at[1] + number * num_stages)
                ports[moved] = tuple(
                    replace(port, dtype=self._dtypes[*at, port.name]) for port in found
                )
        tokens = PortShape("tokens", (rows,), torch.int64, False)
        total = num_stages * self._count
        for at in self.edges(total):
            ports.setdefault(at, (tokens,))
        return Boundary(total, ports)

    def was_traced_with(self, dtypes: Sequence[frozenset[torch.dtype]], autocast: bool) -> bool:
        return True

    def received(
        self, stage: int, sources: Sequence[int], into: Sequence[Sequence[PortShape]]
    ) -> list[tuple[int, int]]:
        number, own = divmod(stage, self._num_stages)
        begin = number * self._num_stages
        found = super().received(own, [source - begin for source in sources], into)
        return found + [(edge, 0) for edge, source in enumerate(sources) if source < begin]

    def sent(self, stage: int, out_of: Sequence[Sequence[PortShape]]) -> tuple[PortShape, ...]:
        own = stage % self._num_stages
        if own == self._num_stages - 1:
            return tuple({port.name: port for ports in out_of for port in ports}.values())
        return super().sent(own, out_of)

    def call(
        self,
        module: nn.Module,
        received: Sequence[torch.Tensor],
        skeleton: Skeleton | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        assert self._now is not None and self._now.microbatch is not None
        microbatch = self._now.microbatch
        number, stage = divmod(self._now.stage, self._num_stages)
        tokens = kwargs.get(self._feed.input_name)
        if number and self._takes_tokens(stage):
            *received, tokens = received
        names = self.info.interfaces[stage].model_inputs
        given = self._feed.inputs(microbatch, number, tokens)
        output = module(*received, **{name: given[name] for name in names})
        return output if stage < self._num_stages - 1 else self._feed.chosen(microbatch)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a batch, which are a tensor, a tuple, or a dict of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def eval_stream(schedule: Schedule, batches: Iterable[Any], at_once: int) -> Iterator[Any]:
    """See `Schedule.eval_stream`."""
    while True:
        calls: list[Any] = []
        rows: list[int] | None = []
        count, problem = 0, None
        try:
            if at_once < 1:
                raise InputError(f"at_once must be at least 1 batch, got {at_once}")
            batches = iter(batches)  # the same one from the second time on
            for inputs in islice(batches, at_once):
                args, kwargs = arguments(inputs)
                call = Call(False, args, kwargs, None, {}, True)
                front, options = schedule.stages[0].front, schedule._options
                found = split_call(call, front, options, schedule.n_microbatches)
                calls += zip(found.args, found.kwargs, strict=True)
                rows = None if rows is None or found.rows is None else [*rows, *found.rows]
                count += 1
        except BaseException as error:
            problem = error
        schedule.check_alike("eval_stream", "the number of batches", count, problem)
        if not count:
            return
        if count not in schedule._longer:
            schedule._longer[count] = _for_batches(schedule, count)
        has_inputs = any(args or kwargs for args, kwargs in calls)
        given = (Microbatches(calls, rows=rows),) if has_inputs else ()
        with torch.no_grad():
            outputs = schedule._longer[count]._run(
                Call(False, given, {}, None, {}, True, batches=count)
            )
        yield from outputs if outputs is not None else [None] * count


def _for_batches(schedule: Schedule, count: int) -> Schedule:
    """The same schedule for `count` times as many microbatches."""
    options = schedule._options
    program = forward_only_on(schedule.program.placement, count * schedule.n_microbatches)
    more = {
        "loss_fn": options.loss_fn,
        "output_merge_spec": options.output_merge_spec,
        "tied": [one.locations for one in options.tied],
    }
    made = _longer(schedule, count, schedule.stages, program, **more)
    made._hooks = schedule._hooks
    return made
