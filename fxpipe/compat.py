"""Stand in for `torch.distributed.pipelining`, private names that real clients import included.

    import fxpipe.compat

    fxpipe.compat.install()     # before the client is imported
    import torchtitan.distributed.pipeline_parallel

From then on, imports of torch's package in this process give fxpipe's objects; `uninstall`
ends it. The private names are thin views of ours: an `_Action` is an `Action` with torch's
order of arguments and attributes, a `_ComputationType` names a `Kind`.

Limit: `register_custom_function` hands a function the action and the schedule. A function
that drives torch's stages itself (torchtitan's overlap of expert parallelism) finds none of
torch's private buffers here and fails.
"""

from __future__ import annotations

import enum
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed

from fxpipe import microbatch, schedules, stage
from fxpipe.errors import ScheduleError
from fxpipe.graph import markers, pipe
from fxpipe.program import Action, Kind
from fxpipe.program.text import parse_action, rows_of_csv
from fxpipe.runtime.stage.executor import ActionContext

__all__ = ["install", "uninstall"]

_log = logging.getLogger(__name__)
_PEER = "torch.distributed.pipelining"


class _ComputationType(enum.StrEnum):
    """torch's names for the kinds of actions."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        try:
            return _ComputationType(action)
        except ValueError:
            known = ", ".join(kind.value for kind in _ComputationType)
            raise ScheduleError(f"there is no action kind {action!r}; known: {known}") from None

    @property
    def kind(self) -> Kind:
        return next(kind for kind in Kind if kind.text == self.value)


class _Action(Action):
    """An `Action` as torch makes and reads it."""

    __slots__ = ()

    def __new__(
        cls,
        stage_index: int,
        computation_type: _ComputationType | str,
        microbatch_index: int | None = None,
        sub_actions: Sequence[Action] | None = None,
    ) -> _Action:
        if sub_actions:
            text = f"({';'.join(map(str, sub_actions))}){computation_type}"
        else:
            number = "" if microbatch_index is None else microbatch_index
            text = f"{stage_index}{computation_type}{number}"
        return cls.of(parse_action(text))

    @classmethod
    def of(cls, action: Action) -> _Action:
        return cls._make(action)

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        text = action_string.strip()
        return _Action.of(parse_action(text)) if text else None

    @property
    def stage_index(self) -> int:
        return self.stage

    @property
    def computation_type(self) -> _ComputationType:
        return _ComputationType(self.kind.text)

    @property
    def microbatch_index(self) -> int | None:
        return self.microbatch

    @property
    def sub_actions(self) -> tuple[_Action, ...] | None:
        return tuple(_Action.of(part) for part in self.parts) or None

    @property
    def is_compute_op(self) -> bool:
        return self.kind.is_compute or self.kind is Kind.OVERLAP

    def __repr__(self) -> str:
        return str(self)


@dataclass
class _PipelineContext:
    """What a function given to `register_custom_function` gets beside the action."""

    schedule_ref: schedules.Schedule
    default: Callable[[], None]
    arg_mbs: list[Any] | None = None
    kwarg_mbs: list[Any] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class _PipelineScheduleRuntime(schedules.PipelineScheduleMulti):
    """A schedule that reads its program from a CSV before the first step.

    schedule = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=loss)
    schedule._load_csv("program.csv")

    Transfers and parameter actions in the file are left out and added anew: fxpipe adds those
    that the stages' own edges need, in an order that it has proved.
    """

    def _load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        if format not in ("compute_only", "compute_comms"):
            raise ScheduleError(f"format must be compute_only or compute_comms, got {format!r}")
        rows = rows_of_csv(Path(filename).read_text())
        self.pipeline_order = {rank: _compute_only(row) for rank, row in enumerate(rows)}


def _compute_only(cells: Sequence[str]) -> list[str]:
    """The cells of a rank without transfers, waits and what is for whole stages."""
    computes = re.compile(
        rf"[0-9]+({'|'.join(kind.text for kind in Kind if kind.is_compute)})[0-9]+"
    )
    found = (cell.strip() for cell in cells)
    return [cell for cell in found if cell.startswith("(") or computes.fullmatch(cell)]


def _register_custom_function(
    self: schedules.Schedule,
    computation_type: _ComputationType,
    custom_function: Callable[[_Action, _PipelineContext], None],
) -> None:
    """Let `custom_function(action, context)` do the actions of a kind, as torch names it."""

    def run(context: ActionContext) -> None:
        given = _PipelineContext(self, context.default)
        custom_function(_Action.of(context.action), given)

    self.replace(computation_type.kind, run)


def _modules() -> dict[str, ModuleType]:
    """torch's package and its modules, filled with our names."""
    kinds = {kind.name: kind for kind in _ComputationType}
    letters = {kind.value: kind for kind in _ComputationType if len(kind.value) == 1}
    of_stage = {
        **_public(stage),
        "_PipelineStage": stage.PipelineStage,
        "_PipelineStageBase": stage.PipelineStage,
    }
    of_schedules = {
        **_public(schedules),
        **kinds,
        **letters,
        "_Action": _Action,
        "_ComputationType": _ComputationType,
        "_PipelineContext": _PipelineContext,
        "_PipelineSchedule": schedules.Schedule,
        "_PipelineScheduleRuntime": _PipelineScheduleRuntime,
        "_wait_batch_p2p": _wait_batch_p2p,
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
        "pipeline": pipe.pipeline,
    }
    package = {**of_ir, **_public(stage), **_public(schedules)}
    contents = {
        "": package,
        ".schedules": of_schedules,
        ".stage": of_stage,
        ".microbatch": of_microbatch,
        "._IR": of_ir,
    }
    made = {}
    for ending, names in contents.items():
        module = ModuleType(_PEER + ending, "fxpipe in the place of torch's module.")
        vars(module).update(names)
        made[_PEER + ending] = module
    made[_PEER].__path__ = []
    for ending in (".schedules", ".stage", ".microbatch", "._IR"):
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
    schedules.Schedule.register_custom_function = _register_custom_function  # type: ignore[attr-defined]
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
