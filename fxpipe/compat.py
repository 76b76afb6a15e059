"""Stand in for `torch.distributed.pipelining`, private names that real clients import included.

    import fxpipe.compat

    fxpipe.compat.install()     # before the client is imported
    import torchtitan.distributed.pipeline_parallel

From then on, imports of torch's package in this process give fxpipe's objects; `uninstall`
ends it. The private names are thin views of ours: an `_Action` is an `Action` with torch's
order of arguments and attributes, a `_ComputationType` names a `Kind`.

What drives torch's stages itself, microbatch by microbatch, runs inside `register_custom_function`
(see `fxpipe.stage`). What reads torch's private buffers finds none.

torch's private passes take and give orders, `{rank: [_Action | None, ...]}` for a whole pipeline or
the list of one rank; the work is done by `fxpipe.program`. A program that computes a backward whole
and then its weight half again is refused, which torch lets through.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch.distributed

from fxpipe import errors, microbatch, schedules, stage
from fxpipe.errors import ScheduleError
from fxpipe.graph import markers, pipe
from fxpipe.program import (
    Action,
    Edges,
    Placement,
    Program,
    Value,
    lower,
    reads,
    validate,
    writes,
)
from fxpipe.program.formats.torch_actions import (
    _Action,
    _ComputationType,
    computes_of,
    order_of,
    program_of_order,
)
from fxpipe.program.lower import join_halves
from fxpipe.program.memory_actions import add_reductions, add_sharding
from fxpipe.schedules import PipelineScheduleSingle, get_schedule_class
from fxpipe.schedules.orders import _PipelineContext
from fxpipe.stage import _PipelineStageBase

__all__ = ["install", "uninstall"]

_log = logging.getLogger(__name__)
_PEER = "torch.distributed.pipelining"


class _ScheduleForwardOnly(schedules.PipelineScheduleSingle):
    """Forwards alone; every other schedule does the same in `eval`."""

    schedule_name = "ForwardOnly"


def _modules() -> dict[str, ModuleType]:
    """torch's package and its modules, filled with our names."""
    kinds = {kind.name: kind for kind in _ComputationType}
    letters = {kind.value: kind for kind in _ComputationType if len(kind.value) == 1}
    of_stage = {
        **_public(stage),
        "_PipelineStage": stage.PipelineStage,
        "_PipelineStageBase": stage._PipelineStageBase,
        "_normalize_model_output_as_tuple": _normalize_model_output_as_tuple,
        "PipeliningMetadataError": errors.PipeliningShapeError,
        "PipeInfo": pipe.PipeInfo,
    }
    of_schedules = {
        **_public(schedules),
        **kinds,
        **letters,
        "_Action": _Action,
        "_ComputationType": _ComputationType,
        "_PipelineContext": _PipelineContext,
        "_PipelineSchedule": schedules.Schedule,
        "_PipelineScheduleRuntime": schedules.PipelineScheduleMulti,
        "_ScheduleForwardOnly": _ScheduleForwardOnly,
        "_wait_batch_p2p": _wait_batch_p2p,
        **{made.__name__: made for made in _PASSES},
    }
    of_microbatch = {
        **_public(microbatch),
        "_Replicate": microbatch.Replicate,
        "_split_block_mask": _split_block_mask,
    }
    of_ir = {
        "Pipe": pipe.Pipe,
        "SplitPoint": markers.SplitPoint,
        "pipe_split": markers.pipe_split,
        "annotate_split_points": markers.annotate_split_points,
        "pipeline": pipe.pipeline,
    }
    of_utils = {
        "PipeInfo": pipe.PipeInfo,
        "PipeliningMetadataError": errors.PipeliningShapeError,
        "PipeliningShapeError": errors.PipeliningShapeError,
        "generate_rank_to_stage_mapping": generate_rank_to_stage_mapping,
        "generate_stage_to_rank_mapping": generate_stage_to_rank_mapping,
    }
    package = {
        **of_ir,
        **_public(stage),
        **_public(schedules),
        "_ScheduleForwardOnly": _ScheduleForwardOnly,
    }
    contents = {
        "": package,
        ".schedules": of_schedules,
        ".stage": of_stage,
        ".microbatch": of_microbatch,
        "._IR": of_ir,
        "._utils": of_utils,
        "._schedule_visualizer": {"get_schedule_ops": get_schedule_ops},
    }
    made = {}
    for ending, names in contents.items():
        module = ModuleType(_PEER + ending, "fxpipe in the place of torch's module.")
        vars(module).update(names)
        made[_PEER + ending] = module
    made[_PEER].__path__ = []
    for ending in filter(None, contents):
        setattr(made[_PEER], ending[1:], made[_PEER + ending])
    return made


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait for the works that a client started itself."""
    for one in work:
        one.wait()


def _split_block_mask(block_mask: Any, num_chunks: int) -> list[Any]:
    """The parts of a flex-attention mask for each microbatch."""
    parts, _ = microbatch.split_args_kwargs_into_chunks((block_mask,), {}, num_chunks)
    return [part[0] for part in parts]


_replaced: dict[str, ModuleType | None] = {}


def install() -> None:
    """Let imports of torch's pipelining in this process give fxpipe's objects."""
    if _replaced:
        return
    if _PEER in sys.modules:
        _log.warning(
            "%s was imported before fxpipe.compat.install(); what other modules took from it "
            "stays torch's: install first",
            _PEER,
        )
    made = _modules()
    known = [name for name in sys.modules if name == _PEER or name.startswith(_PEER + ".")]
    for name in {*known, *made}:
        _replaced[name] = sys.modules.pop(name, None)
    sys.modules.update(made)
    torch.distributed.pipelining = made[_PEER]  # type: ignore[attr-defined]


def uninstall() -> None:
    """Give imports of torch's pipelining back to torch."""
    if not _replaced:
        return
    for name, module in _replaced.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    before = _replaced[_PEER]
    _replaced.clear()
    if before is not None:
        torch.distributed.pipelining = before  # type: ignore[attr-defined]
    elif hasattr(torch.distributed, "pipelining"):
        del torch.distributed.pipelining


Order = Mapping[int, Sequence[_Action | None]]


def _add_send_recv(
    compute_actions: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[_Action | None]]:
    """The order with a send and a receive for each value that changes rank."""
    ranks = [list(computes_of(compute_actions[rank])) for rank in sorted(compute_actions)]
    return order_of(lower(_program(ranks, stage_to_rank, num_stages), fuse=False).ranks)


def _simulate_comms_compute(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[_Action | None]]:
    """The order with one column per step, None where a rank waits.

    In a step each rank does at most one action; a value may be received in the step in which it
    is sent, and read in the next.

    Raises:
        ScheduleError: a ValueError; the order gets stuck.
    """
    ranks = [
        [action.ours() for action in pipeline_order[rank] if action is not None]
        for rank in sorted(pipeline_order)
    ]
    validate(_program(ranks, stage_to_rank, num_stages))
    edges, rows = Edges.chain(num_stages), [deque(row) for row in ranks]
    steps: list[list[Action | None]] = [[] for _ in ranks]
    there: list[set[Value]] = [set() for _ in ranks]
    sent: set[Value] = set()
    while any(rows):
        now: list[Action | None] = [None] * len(rows)
        for receives in (False, True):
            for rank, row in enumerate(rows):
                if row and row[0].kind.is_recv == receives and now[rank] is None:
                    needed = writes(row[0], edges) if receives else reads(row[0], edges)
                    if (sent if receives else there[rank]).issuperset(needed):
                        now[rank] = row.popleft()
            sent.update(v for a in now if a is not None and a.kind.is_send for v in reads(a, edges))
        for rank, action in enumerate(now):
            steps[rank].append(action)
            there[rank].update(() if action is None else writes(action, edges))
    return order_of(steps)


def _validate_schedule(
    actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """Which rank holds which stage.

    Raises:
        ScheduleError: an AssertionError; the order computes something else, or gets stuck.
    """
    program = program_of_order(actions, name="the order")
    validate(program)
    found = (program.num_ranks, program.num_stages, program.num_microbatches)
    if found != (pp_group_size, num_stages, num_microbatches):
        raise ScheduleError(f"the order is for {found} ranks, stages and microbatches")
    if not program.has_backward:
        raise ScheduleError("the order has forwards alone")
    return dict(enumerate(program.placement.stage_to_rank))


def _merge_bw(compute_actions: Sequence[_Action | None]) -> list[_Action | None]:
    """A rank's actions with neighbouring halves of a backward as one."""
    actions = list(computes_of(compute_actions))
    return order_of([join_halves(actions, {action.stage for action in actions})])[0]


def _add_unshard_reshard(
    compute_actions: Sequence[_Action | None], max_active_stages: int = 3
) -> list[_Action | None]:
    """A rank's actions with its stages gathered before and released after their use."""
    actions = list(computes_of(compute_actions))
    return order_of([add_sharding(0, actions, len(_stages(actions)), max_active_stages)])[0]


def _add_reduce_grad(
    actions: Sequence[_Action | None], n_microbatches: int
) -> list[_Action | None]:
    """A rank's actions with a reduction after each stage's last weight gradient."""
    computes = list(computes_of(actions))
    return order_of([add_reductions(computes, _stages(computes))])[0]


def _format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """The order as text, a line for each rank."""
    lines = []
    for rank in sorted(pipeline_order):
        cells = [str(action) if action is not None else "-" for action in pipeline_order[rank]]
        if error_step_number is not None and error_step_number < len(cells):
            cells[error_step_number] += "<-here"
        lines.append(f"rank {rank}: {' '.join(cells)}")
    return "\n".join(lines)


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """The rank of each stage: "loop" goes round the ranks, "v" down and up again."""
    if style not in ("loop", "v"):
        raise ScheduleError(f"style must be 'loop' or 'v', got {style!r}")
    make = Placement.loop if style == "loop" else Placement.v
    return dict(enumerate(make(pp_size, num_stages).stage_to_rank))


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """The stages of each rank; see `generate_stage_to_rank_mapping`."""
    rank_of = generate_stage_to_rank_mapping(pp_size, num_stages, style)
    return {rank: [s for s, r in rank_of.items() if r == rank] for rank in range(pp_size)}


def get_schedule_ops(
    schedule: str | type[Any],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[list[_Action | None]]:
    """The actions of each rank of a schedule by name or class, without any stage to run."""
    kind: type[Any] = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    is_single = issubclass(kind, PipelineScheduleSingle)
    count = num_stages_per_rank or (1 if is_single else 2)
    stages = [_Listed(pp_degree * count, pp_degree) for _ in range(count)]
    made: Any = kind(stages, num_microbatches, receives="late" if defer_pp_recv else "early")
    order = made.pipeline_order_with_comms if with_comms else made.pipeline_order
    if not add_spacing:
        order = {rank: [a for a in row if a is not None] for rank, row in order.items()}
    return [order[rank] for rank in sorted(order)]


class _Listed(_PipelineStageBase):
    """A stage in name only."""

    def __init__(self, num_stages: int, group_size: int) -> None:
        self.num_stages = num_stages
        self.group_size = group_size


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    """What a stage returned as the tuple that it sends."""
    return tuple(output) if isinstance(output, list | tuple) else (output,)


def _program(
    ranks: Sequence[Sequence[Action]], stage_to_rank: Callable[[int], int], num_stages: int
) -> Program:
    parts = [part for row in ranks for action in row for part in action.each]
    count = 1 + max((part.microbatch or 0 for part in parts), default=0)
    placed = Placement(len(ranks), tuple(map(stage_to_rank, range(num_stages))))
    return Program.of(placed, count, ranks)


def _stages(actions: Sequence[Action]) -> set[int]:
    return {part.stage for action in actions for part in action.each}


_PASSES = (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _format_pipeline_order,
    _merge_bw,
    _normalize_model_output_as_tuple,
    _simulate_comms_compute,
    _validate_schedule,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
    get_schedule_ops,
)
"""torch's passes over orders, all of which `torch.distributed.pipelining.schedules` has."""
