"""Forwards of many batches, one behind the other: the pipeline is not drained between them.

Several batches run as the microbatches of one call, so with p ranks, m microbatches and b
batches per call (p - 1) / (b m + p - 1) of the time is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.program.generators import forward_only_on
from fxpipe.runtime.agree.request import Call, split_call

if TYPE_CHECKING:
    from fxpipe.schedules.base import Schedule

__all__ = ["arguments", "eval_stream"]


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
            schedule._longer[count] = _longer(schedule, count)
        has_inputs = any(args or kwargs for args, kwargs in calls)
        given = (Microbatches(calls, rows=rows),) if has_inputs else ()
        with torch.no_grad():
            outputs = schedule._longer[count]._run(
                Call(False, given, {}, None, {}, True, batches=count)
            )
        yield from outputs if outputs is not None else [None] * count


def _longer(schedule: Schedule, count: int) -> Schedule:
    """The same schedule for `count` times as many microbatches."""
    from fxpipe.schedules.named import ScheduleFromProgram

    options = schedule._options
    program = forward_only_on(schedule.program.placement, count * schedule.n_microbatches)
    made = ScheduleFromProgram(
        list(schedule.stages),
        program,
        options.loss_fn,
        output_merge_spec=options.output_merge_spec,
        timeout=options.timeout * count,
        receives=options.receives,
        boundary_dtype=options.boundary_dtype,
        tp_group=options.tp_group,
        max_outstanding_sends=options.max_outstanding_sends,
        tied=[one.locations for one in options.tied],
    )
    made._hooks = schedule._hooks
    return made
