"""Check what a schedule is given, and fill in what is left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpipe.errors import InputError, ScheduleError
from fxpipe.program import Kind, Span, Timeline
from fxpipe.program.generators import get_schedule
from fxpipe.runtime.stage.stage_kind import Front, Stage
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group

__all__ = [
    "TiedStages",
    "action_kind",
    "count_microbatches",
    "count_ranks",
    "floating_dtype",
    "measured_timeline",
    "outstanding_sends",
    "running_stages",
    "sharing_group",
    "stage_list",
    "timeout_seconds",
]

S = TypeVar("S", bound=Stage)


class TiedStages:
    """Places that hold one parameter, as a user listed them."""

    def __init__(self, locations: tuple[tuple[int, str], ...]) -> None:
        self.locations = locations


def stage_list(stages: S | Sequence[S]) -> list[S]:
    """The stages of a rank, in increasing order; they may be given in any."""
    found: list[Any] = list(stages) if isinstance(stages, list | tuple) else [stages]
    if not found:
        raise InputError("a schedule needs at least one stage")
    for stage in found:
        if not hasattr(stage, "num_stages"):
            raise InputError(
                f"a schedule runs PipelineStage objects, got {type(stage).__name__}; "
                "use pipe.build_stage(i, device) or PipelineStage(module, i, num_stages, device)"
            )
    numbers = {stage.num_stages for stage in found}
    if len(numbers) > 1:
        raise InputError(f"the stages disagree on num_stages: {sorted(numbers)}")
    if not all(hasattr(stage, "stage_index") for stage in found):
        return found  # stands for stages, in a schedule that is listed and never runs
    indices = [stage.stage_index for stage in found]
    if len(set(indices)) != len(indices):
        raise InputError(f"each stage must be given once, got {indices}")
    return sorted(found, key=lambda stage: stage.stage_index)


def running_stages(stages: Sequence[S]) -> Sequence[S]:
    """The stages, which must be such that they can run."""
    for stage in stages:
        if not isinstance(getattr(stage, "front", None), Front):
            raise InputError(
                f"a {type(stage).__name__} stands for a stage and cannot run; "
                "use pipe.build_stage(i, device) or PipelineStage(module, i, num_stages, device)"
            )
    return stages


def count_microbatches(n_microbatches: int) -> int:
    if not isinstance(n_microbatches, int) or n_microbatches < 1:
        raise InputError(f"n_microbatches must be a whole number from 1 up, got {n_microbatches!r}")
    return n_microbatches


def count_ranks(stages: Sequence[Any], name: str) -> int:
    """The number of ranks: the group's, or all that the stages here are for."""
    first = stages[0]
    num_stages: int = first.num_stages
    runs = isinstance(getattr(first, "front", None), Front)
    if first.group is not None or torch.distributed.is_initialized() or not runs:
        return int(first.group_size)
    if len(stages) != num_stages:
        raise InputError(
            f"{len(stages)} of {num_stages} stages were given and torch.distributed is not "
            "initialised; give all stages to run them in this process, or start the processes"
        )
    if not name:
        return num_stages
    least = get_schedule(name).stages_per_rank[0]
    return max(1, num_stages // max(least, 1))


def floating_dtype(boundary_dtype: torch.dtype | None) -> torch.dtype | None:
    is_dtype = isinstance(boundary_dtype, torch.dtype) and boundary_dtype.is_floating_point
    if boundary_dtype is not None and not is_dtype:
        raise InputError(
            f"boundary_dtype must be a floating-point dtype, such as torch.bfloat16, got "
            f"{boundary_dtype!r}"
        )
    return boundary_dtype


def sharing_group(tp_group: Any, group: Any) -> dist.ProcessGroup | None:
    """The ranks that send a share of each value, if there are several; see `Shares`."""
    if tp_group is None:
        return None
    if not isinstance(tp_group, dist.ProcessGroup):
        raise InputError(f"tp_group must be a process group, got {type(tp_group).__name__}")
    pipeline = resolve_group(group)
    if not isinstance(pipeline, LocalGroup):
        ranks = set(dist.get_process_group_ranks(tp_group))
        both = sorted(ranks.intersection(dist.get_process_group_ranks(pipeline)))
        if len(both) > 1:
            raise InputError(
                f"tp_group has the ranks {both} of one pipeline, but must have one rank of each of "
                "several pipelines that run the same stages"
            )
    return tp_group if tp_group.size() > 1 else None


def measured_timeline(num_ranks: int, spans: Sequence[Span]) -> Timeline:
    begin = min((span.start for span in spans), default=0.0)
    moved = [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]
    moved.sort(key=lambda span: (span.start, span.rank))
    return Timeline(num_ranks, tuple(moved), ((),) * num_ranks, ())


_YEAR = 366.0 * 24 * 3600


def timeout_seconds(timeout: float | None) -> float:
    if timeout is None:
        timeout = float(os.environ.get("FXPIPE_TIMEOUT", "1800"))
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < _YEAR:  # also for nan
        raise InputError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timeout


def outstanding_sends(limit: int | None, receives: str) -> int | None:
    """How many sends a rank may keep. Who waits for a send waits for its receive, so these stand
    where the sender sends: then all ranks follow one order, and no two wait for each other.
    """
    if limit is None:
        return None
    if not isinstance(limit, int) or limit < 1:
        raise InputError(f"max_outstanding_sends must be a whole number from 1 up, got {limit!r}")
    if receives != "early":
        raise InputError(
            f"max_outstanding_sends={limit} needs receives='early', got {receives!r}: a rank that "
            "waits for a send could wait for a receive that is posted too late"
        )
    return limit


def action_kind(kind: str | Kind) -> Kind:
    if isinstance(kind, Kind):
        return kind
    for known in Kind:
        if kind in (known.name, known.text):
            return known
    raise ScheduleError(
        f"there is no action kind {kind!r}; known: {', '.join(known.text for known in Kind)}"
    )
