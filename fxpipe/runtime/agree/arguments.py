"""Check what a schedule is given, and fill in what is left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

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
    "measured_timeline",
    "stage_list",
    "timeout_seconds",
]

S = TypeVar("S", bound=Stage)


class TiedStages:
    """Places that hold one parameter, as a user listed them."""

    def __init__(self, locations: tuple[tuple[int, str], ...]) -> None:
        self.locations = locations


def stage_list(stages: S | Sequence[S]) -> list[S]:
    found: list[Any] = list(stages) if isinstance(stages, list | tuple) else [stages]
    if not found:
        raise InputError("a schedule needs at least one stage")
    for stage in found:
        if not isinstance(getattr(stage, "front", None), Front):
            raise InputError(
                f"a schedule runs PipelineStage objects, got {type(stage).__name__}; "
                "use pipe.build_stage(i, device) or PipelineStage(module, i, num_stages, device)"
            )
    numbers = {stage.num_stages for stage in found}
    if len(numbers) > 1:
        raise InputError(f"the stages disagree on num_stages: {sorted(numbers)}")
    indices = [stage.stage_index for stage in found]
    if sorted(set(indices)) != indices:
        raise InputError(f"stages must come in increasing order, each once, got {indices}")
    return found


def count_microbatches(n_microbatches: int) -> int:
    if not isinstance(n_microbatches, int) or n_microbatches < 1:
        raise InputError(f"n_microbatches must be a whole number from 1 up, got {n_microbatches!r}")
    return n_microbatches


def count_ranks(
    group: torch.distributed.ProcessGroup | LocalGroup | None,
    stages: Sequence[Stage],
    name: str,
) -> int:
    known = group is not None or torch.distributed.is_initialized()
    if known:
        resolved = resolve_group(group)
        return resolved.num_ranks if isinstance(resolved, LocalGroup) else resolved.size()
    num_stages = stages[0].num_stages
    if len(stages) != num_stages:
        raise InputError(
            f"{len(stages)} of {num_stages} stages were given and torch.distributed is not "
            "initialised; give all stages to run them in this process, or start the processes"
        )
    if not name:
        return num_stages
    least = get_schedule(name).stages_per_rank[0]
    return max(1, num_stages // max(least, 1))


def measured_timeline(num_ranks: int, spans: Sequence[Span]) -> Timeline:
    begin = min((span.start for span in spans), default=0.0)
    moved = [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]
    moved.sort(key=lambda span: (span.start, span.rank))
    return Timeline(num_ranks, tuple(moved), ((),) * num_ranks, ())


def timeout_seconds(timeout: float | None) -> float:
    if timeout is None:
        timeout = float(os.environ.get("FXPIPE_TIMEOUT", "1800"))
    if timeout <= 0:
        raise InputError(f"timeout must be a positive number of seconds, got {timeout}")
    return timeout


def action_kind(kind: str | Kind) -> Kind:
    if isinstance(kind, Kind):
        return kind
    for known in Kind:
        if kind in (known.name, known.text):
            return known
    raise ScheduleError(
        f"there is no action kind {kind!r}; known: {', '.join(known.text for known in Kind)}"
    )
