"""The schedules: what runs a pipeline's stages over the microbatches of a batch.

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
    schedule.step(x, target=y)      # on every rank; then optimizer.step()
    output = schedule.eval(x)

Each class is a name for a program (see `fxpipe.program`); all share one executor.
With R ranks, rank r holds the stages r, r + R, ... (looped schedules) or r and
2R - 1 - r (V schedules), given in this order. With a `LocalGroup` one process holds
all of them.

Gradients are those of the plain model on the whole batch. A scalar loss is taken
for a mean over its microbatch and weighted by rows; `scale_grads=False` sums
instead. A loss function may return `(sum, weight)` for a weighted mean over the
batch.
"""

from fxpipe.liveness import PipelineActivationLiveness, analyze_pipeline_activation_liveness
from fxpipe.program.generators import SCHEDULES
from fxpipe.schedules import named
from fxpipe.schedules.base import Schedule
from fxpipe.schedules.named import (
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
from fxpipe.schedules.orders import PipelineScheduleMulti, PipelineScheduleSingle

__all__ = [
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleDualPipeVDown",
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
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]
# A schedule that is only in the registry has a class, too.
_MORE = [f"Schedule{info.name}" for info in SCHEDULES.values() if info.trains]
globals().update({name: getattr(named, name) for name in _MORE})
__all__ += [name for name in _MORE if name not in __all__]
