"""Split any PyTorch model into pipeline stages and train it across processes.

The names are those of `torch.distributed.pipelining`, so that changing the import is
the migration, and a few more:

    from fxpipe import pipeline, SplitPoint, Schedule1F1B

    pipe = pipeline(model, (x,), num_stages=4)
    stage = pipe.build_stage(rank, device)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
    schedule.step(x, target=y)
"""

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
from fxpipe.microbatch import (
    Microbatches,
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from fxpipe.runtime.local import LocalGroup
from fxpipe.runtime.loss import aux_loss, collect_aux_losses
from fxpipe.schedules import *
from fxpipe.stage import PipelineStage, build_stage
from fxpipe.graph.markers import SplitPoint, pipe_split
from fxpipe.graph.pipe import Pipe, pipeline
