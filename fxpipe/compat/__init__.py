"""Stand in for `torch.distributed.pipelining`, private names that real clients import included.

    import fxpipe.compat

    fxpipe.compat.install()     # before the client is imported
    import torchtitan.distributed.pipeline_parallel

From then on, imports of torch's package in this process give fxpipe's objects; `uninstall`
ends it. The private names are thin views of ours: an `_Action` is an `Action` with torch's
order of arguments and attributes, a `_ComputationType` names a `Kind`.

What drives torch's stages itself, microbatch by microbatch, runs inside `register_custom_function`
(see `fxpipe.chunk_calls`). What reads torch's private buffers finds none.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch.distributed

from fxpipe import errors, liveness, microbatch, schedules, stage
from fxpipe.chunk_calls import _PipelineContext
from fxpipe.compat import passes
from fxpipe.graph import markers, pipe
from fxpipe.program.formats.torch_actions import _Action, _ComputationType

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
        "_normalize_model_output_as_tuple": passes._normalize_model_output_as_tuple,
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
        **_public(passes),
        **_public(liveness),
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
        "generate_rank_to_stage_mapping": passes.generate_rank_to_stage_mapping,
        "generate_stage_to_rank_mapping": passes.generate_stage_to_rank_mapping,
    }
    package = {
        **of_ir,
        **_public(stage),
        **_public(schedules),
        **_public(liveness),
        "_ScheduleForwardOnly": _ScheduleForwardOnly,
    }
    contents = {
        "": package,
        ".schedules": of_schedules,
        ".stage": of_stage,
        ".microbatch": of_microbatch,
        "._IR": of_ir,
        "._utils": of_utils,
        "._schedule_visualizer": {"get_schedule_ops": passes.get_schedule_ops},
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
