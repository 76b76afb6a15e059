"""Split any PyTorch model into pipeline stages and train it across processes.

The names are those of `torch.distributed.pipelining`, so that changing the import is
the migration, and a few more:

    from fxpipe import pipeline, Schedule1F1B

    pipe = pipeline(model, (x,), num_stages=4)
    stage = pipe.build_stage(rank, device)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
    schedule.step(x, target=y)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.logs import configure_from_environment

if TYPE_CHECKING:
    from fxpipe.errors import (
        FxpipeError,
        InputError,
        PipeliningShapeError,
        PlanError,
        RemoteStageError,
        ScheduleError,
        SplitError,
        TraceError,
    )
    from fxpipe.graph.aux_losses import aux_loss, collect_aux_losses
    from fxpipe.graph.markers import SplitPoint, pipe_split
    from fxpipe.graph.pipe import Pipe, PipeInfo, pipeline
    from fxpipe.liveness import (
        PipelineActivationLiveness,
        analyze_pipeline_activation_liveness,
    )
    from fxpipe.microbatch import (
        Microbatches,
        Replicate,
        TensorChunkSpec,
        merge_chunks,
        split_args_kwargs_into_chunks,
    )
    from fxpipe.planner.cost.hardware import Hardware
    from fxpipe.planner.cost.measured import Profile
    from fxpipe.planner.order.improve import improve
    from fxpipe.planner.partition.partition import partition
    from fxpipe.planner.plan import Plan, plan
    from fxpipe.planner.search.auto_split import auto_split
    from fxpipe.planner.search.profile import profile
    from fxpipe.runtime.wire.local_group import LocalGroup
    from fxpipe.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleDualPipeVDown,
        ScheduleFromProgram,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleVHalf,
        ScheduleVMin,
        ScheduleWave,
        ScheduleZBH1,
        ScheduleZBH2,
        ScheduleZBVZeroBubble,
        get_schedule_class,
    )
    from fxpipe.stage import PipelineStage, PipelineStageInfo, build_stage
    from fxpipe.training.checkpoint import load_checkpoint, save_checkpoint
    from fxpipe.training.generate import generate
    from fxpipe.training.pipeline import Pipeline, ProgressBar, causal_lm_loss
    from fxpipe.training.scaler import GradScaler
    from fxpipe.training.weights import load_weights, materialize, save_weights

__version__ = "0.1.0"

configure_from_environment()

# Where each public name lives. Torch and the rest are imported when a name is first used, so
# that the command line can print its help at once.
_HOMES = {
    "errors": "FxpipeError InputError PipeliningShapeError PlanError RemoteStageError "
    "ScheduleError SplitError TraceError",
    "graph.aux_losses": "aux_loss collect_aux_losses",
    "graph.markers": "SplitPoint pipe_split",
    "graph.pipe": "Pipe PipeInfo pipeline",
    "liveness": "PipelineActivationLiveness analyze_pipeline_activation_liveness",
    "microbatch": "Microbatches Replicate TensorChunkSpec merge_chunks "
    "split_args_kwargs_into_chunks",
    "planner.cost.hardware": "Hardware",
    "planner.cost.measured": "Profile",
    "planner.order.improve": "improve",
    "planner.partition.partition": "partition",
    "planner.plan": "Plan plan",
    "planner.search.auto_split": "auto_split",
    "planner.search.profile": "profile",
    "runtime.wire.local_group": "LocalGroup",
    "schedules": "PipelineScheduleMulti PipelineScheduleSingle ScheduleFromProgram "
    "get_schedule_class Schedule1F1B ScheduleDualPipeV ScheduleDualPipeVDown ScheduleGPipe "
    "ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleVHalf "
    "ScheduleVMin ScheduleWave ScheduleZBH1 ScheduleZBH2 ScheduleZBVZeroBubble",
    "stage": "PipelineStage PipelineStageInfo build_stage",
    "training.generate": "generate",
    "training.pipeline": "Pipeline ProgressBar causal_lm_loss",
    "training.checkpoint": "load_checkpoint save_checkpoint",
    "training.scaler": "GradScaler",
    "training.weights": "load_weights materialize save_weights",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_PACKAGES = ("errors", "graph", "microbatch", "program", "runtime", "schedules", "stage", "viz")

if not TYPE_CHECKING:  # with it a type checker would believe in any name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"fxpipe.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"fxpipe.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


__all__ = [
    "FxpipeError",
    "GradScaler",
    "Hardware",
    "InputError",
    "LocalGroup",
    "Microbatches",
    "Pipe",
    "PipeInfo",
    "Pipeline",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipelineStageInfo",
    "PipeliningShapeError",
    "Plan",
    "PlanError",
    "Profile",
    "ProgressBar",
    "RemoteStageError",
    "Replicate",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleDualPipeVDown",
    "ScheduleError",
    "ScheduleFromProgram",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleWave",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "SplitError",
    "SplitPoint",
    "TensorChunkSpec",
    "TraceError",
    "__version__",
    "analyze_pipeline_activation_liveness",
    "auto_split",
    "aux_loss",
    "build_stage",
    "causal_lm_loss",
    "collect_aux_losses",
    "generate",
    "get_schedule_class",
    "improve",
    "load_checkpoint",
    "load_weights",
    "materialize",
    "merge_chunks",
    "partition",
    "pipe_split",
    "pipeline",
    "plan",
    "profile",
    "save_checkpoint",
    "save_weights",
    "split_args_kwargs_into_chunks",
]
