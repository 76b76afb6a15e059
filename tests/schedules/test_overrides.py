"""What would have no effect is refused: methods that are never called, attributes read once."""

import pytest
import torch
from torch import nn

from fxpipe import LocalGroup, PipelineStage, Schedule1F1B, ScheduleError, ScheduleGPipe
from fxpipe.schedules.base import FIXED


def stages(kind: type[PipelineStage] = PipelineStage) -> list[PipelineStage]:
    return [kind(nn.Linear(4, 4), i, 2, "cpu", group=LocalGroup(2)) for i in range(2)]


class Tripled(ScheduleGPipe):
    def _compute_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 3 * nn.functional.mse_loss(output, target)


class Timed(PipelineStage):
    def forward_one_chunk(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("never called")


def test_a_method_that_is_never_called_is_refused() -> None:
    # The loss of the class was ignored in silence.
    with pytest.raises(ScheduleError, match=r"Tripled overrides _compute_loss.*give .* a loss_fn"):
        Tripled(stages(), 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ScheduleError, match="Timed overrides forward_one_chunk"):
        Schedule1F1B(stages(Timed), 2)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_an_attribute_that_is_read_once_cannot_be_set(name: str) -> None:
    schedule = Schedule1F1B(stages(), 2, loss_fn=nn.functional.mse_loss)

    with pytest.raises(ScheduleError, match=f"{name} of a schedule is fixed"):
        setattr(schedule, name, 1)
