"""Forwards of many batches, one behind the other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpipe import InputError, LocalGroup, RemoteStageError, Schedule1F1B, pipeline
from fxpipe.runtime.control.group_control import GroupControl
from tests.distributed.ranks import run_on_ranks


def made(group: Any = None, indices: range = range(2)) -> tuple[nn.Module, Schedule1F1B]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))
    pipe = pipeline(model, (torch.zeros(2, 4),), num_stages=2, check=False)
    stages = [pipe.build_stage(i, torch.device("cpu"), group) for i in indices]
    return model, Schedule1F1B(stages, 2, loss_fn=F.mse_loss)


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4 + 2 * (i % 2), 4) for i in range(count)]


def test_outputs_are_those_of_the_plain_model_batch_by_batch() -> None:
    model, schedule = made(LocalGroup(2))
    given = batches(7)
    order: list[str] = []
    schedule.before("F", lambda action: order.append(str(action)))

    found = list(schedule.eval_stream(given, at_once=3))

    assert len(found) == 7
    for output, batch in zip(found, given, strict=True):
        torch.testing.assert_close(output, model(batch))
    # Three batches are six microbatches of one program: nothing is drained in between.
    rows = [[one for one in order[:12] if one[0] == stage] for stage in "01"]
    assert rows == [[f"{stage}F{m}" for m in range(6)] for stage in "01"]
    assert schedule.stages[0].has_backward
    assert list(schedule.eval_stream([], at_once=3)) == []
    with pytest.raises(InputError, match="at_once must be at least 1 batch, got 0"):
        next(schedule.eval_stream(given, at_once=0))


def on_ranks(rank: int) -> tuple[int, str]:
    model, schedule = made(indices=range(rank, rank + 1))
    given = batches(5)
    met = []
    exchange = GroupControl.exchange

    def counted(*args: Any, **kwargs: Any) -> Any:
        met.append(1)
        return exchange(*args, **kwargs)

    list(schedule.eval_stream(given))  # agrees on shapes
    GroupControl.exchange = counted  # type: ignore[method-assign]
    # Inputs are needed where the first stage is, and only there.
    found = list(schedule.eval_stream(given if rank == 0 else [()] * 5))
    GroupControl.exchange = exchange  # type: ignore[method-assign]
    for output, batch in zip(found, given, strict=True):
        if rank == 1:
            torch.testing.assert_close(output, model(batch))
        else:
            assert output is None

    def failing() -> Iterator[torch.Tensor]:
        yield given[0]
        raise OSError("the disk is gone")

    with pytest.raises((OSError, RemoteStageError), match="the disk is gone"):
        list(schedule.eval_stream(failing() if rank == 0 else given[:1]))
    with pytest.raises(InputError, match="the number of batches must be the same") as caught:
        list(schedule.eval_stream(given[: 2 + rank]))
    schedule.step(given[0], target=torch.zeros(4, 3))  # and training goes on
    return len(met), str(caught.value)


def test_ranks_meet_once_for_all_batches_and_agree_on_their_number() -> None:
    answers = run_on_ranks(2, on_ranks)

    assert answers[0] == answers[1]
    number, words = answers[0]
    assert number <= 6  # not more for more batches
    assert "2 on rank 0, 3 on rank 1" in words
