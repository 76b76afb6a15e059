"""Schedules of the user's own: classes that set `pipeline_order`, as with torch."""

import pytest
import torch

from fxpipe import LocalGroup, PipelineScheduleMulti, PipelineStage
from fxpipe.errors import ScheduleError
from fxpipe.program.generators import gpipe
from tests.runtime.stages import Block, mse, rand, run_plain

ORDER = {rank: [None] * rank + list(row) for rank, row in enumerate(gpipe(2, 2, 3).ranks)}


class SetAfter(PipelineScheduleMulti):
    def __init__(self, stages, n_microbatches, **options):
        super().__init__(stages, n_microbatches, **options)
        self.pipeline_order = ORDER


class SetBefore(PipelineScheduleMulti):
    def __init__(self, stages, n_microbatches, **options):
        self.pipeline_order = {r: [a and str(a) for a in row] for r, row in ORDER.items()}
        super().__init__(stages, n_microbatches, **options)


class Filled(PipelineScheduleMulti):
    """As torch's own classes do it; the dict is there."""

    def __init__(self, stages, n_microbatches, **options):
        super().__init__(stages, n_microbatches, **options)
        for rank, row in ORDER.items():
            self.pipeline_order[rank] = row


class Emptied(Filled):
    def __init__(self, stages, n_microbatches, **options):
        self.pipeline_order = {}
        super().__init__(stages, n_microbatches, **options)


def stages(modules):
    group = LocalGroup(2)
    return [PipelineStage(m.double(), i, 2, "cpu", group=group) for i, m in enumerate(modules)]


@pytest.mark.parametrize("kind", [SetAfter, SetBefore, Filled, Emptied])
def test_own_order_trains_like_the_plain_model(kind):
    modules = [Block(), Block()]
    schedule = kind(stages(modules), 3, loss_fn=mse)
    x, y = rand(6, 8), rand(6, 8, seed=2)

    schedule.step(x, target=y)

    found = [p.grad.clone() for m in modules for p in m.parameters()]
    for module in modules:
        module.zero_grad()
    mse(run_plain(modules, x), y).backward()
    wanted = [p.grad for m in modules for p in m.parameters()]
    assert schedule.program.ranks == gpipe(2, 2, 3).ranks
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain)
    with pytest.raises(ScheduleError, match="to change it, set the whole dict"):
        schedule.pipeline_order[0] = []


def test_an_order_for_other_numbers_is_refused():
    with pytest.raises(ScheduleError, match=r"and 3 microbatches.*has 2, 2 and 4"):
        SetBefore(stages([Block(), Block()]), 4, loss_fn=mse)
