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

if TYPE_CHECKING:  # `as` tells type checkers that the names are public
    from fxpipe.errors import FxpipeError as FxpipeError
    from fxpipe.errors import InputError as InputError
    from fxpipe.errors import PipeliningShapeError as PipeliningShapeError
    from fxpipe.errors import PlanError as PlanError
    from fxpipe.errors import RemoteStageError as RemoteStageError
    from fxpipe.errors import ScheduleError as ScheduleError
    from fxpipe.errors import SplitError as SplitError
    from fxpipe.errors import TraceError as TraceError
    from fxpipe.graph.aux_losses import aux_loss as aux_loss
    from fxpipe.graph.aux_losses import collect_aux_losses as collect_aux_losses
    from fxpipe.graph.markers import SplitPoint as SplitPoint
    from fxpipe.graph.markers import pipe_split as pipe_split
    from fxpipe.graph.pipe import Pipe as Pipe
    from fxpipe.graph.pipe import PipeInfo as PipeInfo
    from fxpipe.graph.pipe import pipeline as pipeline
    from fxpipe.liveness import PipelineActivationLiveness as PipelineActivationLiveness
    from fxpipe.liveness import (
        analyze_pipeline_activation_liveness as analyze_pipeline_activation_liveness,
    )
    from fxpipe.microbatch import Microbatches as Microbatches
    from fxpipe.microbatch import Replicate as Replicate
    from fxpipe.microbatch import TensorChunkSpec as TensorChunkSpec
    from fxpipe.microbatch import merge_chunks as merge_chunks
    from fxpipe.microbatch import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
    from fxpipe.planner.cost.hardware import Hardware as Hardware
    from fxpipe.planner.cost.measured import Profile as Profile
    from fxpipe.planner.order.improve import improve as improve
    from fxpipe.planner.partition.partition import partition as partition
    from fxpipe.planner.plan import Plan as Plan
    from fxpipe.planner.plan import plan as plan
    from fxpipe.planner.search.auto_split import auto_split as auto_split
    from fxpipe.planner.search.profile import profile as profile
    from fxpipe.runtime.wire.local_group import LocalGroup as LocalGroup
    from fxpipe.schedules import PipelineScheduleMulti as PipelineScheduleMulti
    from fxpipe.schedules import PipelineScheduleSingle as PipelineScheduleSingle
    from fxpipe.schedules import Schedule1F1B as Schedule1F1B
    from fxpipe.schedules import ScheduleDualPipeV as ScheduleDualPipeV
    from fxpipe.schedules import ScheduleDualPipeVDown as ScheduleDualPipeVDown
    from fxpipe.schedules import ScheduleFromProgram as ScheduleFromProgram
    from fxpipe.schedules import ScheduleGPipe as ScheduleGPipe
    from fxpipe.schedules import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from fxpipe.schedules import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
    from fxpipe.schedules import ScheduleLoopedBFS as ScheduleLoopedBFS
    from fxpipe.schedules import ScheduleVHalf as ScheduleVHalf
    from fxpipe.schedules import ScheduleVMin as ScheduleVMin
    from fxpipe.schedules import ScheduleWave as ScheduleWave
    from fxpipe.schedules import ScheduleZBH1 as ScheduleZBH1
    from fxpipe.schedules import ScheduleZBH2 as ScheduleZBH2
    from fxpipe.schedules import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from fxpipe.schedules import get_schedule_class as get_schedule_class
    from fxpipe.stage import PipelineStage as PipelineStage
    from fxpipe.stage import PipelineStageInfo as PipelineStageInfo
    from fxpipe.stage import build_stage as build_stage
    from fxpipe.training.checkpoint import load_checkpoint as load_checkpoint
    from fxpipe.training.checkpoint import save_checkpoint as save_checkpoint
    from fxpipe.training.generate import generate as generate
    from fxpipe.training.pipeline import Pipeline as Pipeline
    from fxpipe.training.pipeline import ProgressBar as ProgressBar
    from fxpipe.training.pipeline import causal_lm_loss as causal_lm_loss
    from fxpipe.training.scaler import GradScaler as GradScaler
    from fxpipe.training.weights import load_weights as load_weights
    from fxpipe.training.weights import materialize as materialize
    from fxpipe.training.weights import save_weights as save_weights

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


__all__ = ["__version__", *_HOME_OF]
