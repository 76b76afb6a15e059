"""Ranks meet in a store that other process groups have used before them."""

import datetime
import hashlib
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fxpipe import PipelineStage, RemoteStageError, Schedule1F1B
from fxpipe.runtime.control import board, meeting
from tests.distributed.bodies import blocks, mse, rand
from tests.distributed.ranks import run_on_ranks


def again_in_one_store(rank: int) -> list[float]:
    """Three process groups, one after the other, over one store, as under torchrun.

    torch's own rendezvous gets prefixes: over a used store it fails at random.
    """
    limit = datetime.timedelta(seconds=100)
    port = int(os.environ["MASTER_PORT"])
    losses = []
    dist.barrier()  # or who is connected ends the group while the other one still connects
    for number in range(3):
        dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, 2, False, limit)
        own = dist.PrefixStore(f"torch/{number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=limit)
        made = Schedule1F1B([PipelineStage(blocks(2)[rank], rank, 2, "cpu")], 2, loss_fn=mse)
        found: list[torch.Tensor] = []
        with mock.patch.object(meeting, "default_store", return_value=store):
            made.step(rand(4, 8), target=rand(4, 8), losses=found)
        losses += [float(sum(found))] if found else []
    return losses


def test_what_an_earlier_process_group_has_left_in_the_store_is_not_believed() -> None:
    # The words of the first group were taken for those of the second: a rank connected to a
    # socket that was gone.
    first, second = run_on_ranks(2, again_in_one_store)

    assert first == [] and len(second) == 3 and len(set(second)) == 1


def again_after_a_failure(rank: int, first: int) -> list[str]:
    """Two process groups over one store. In the first, rank 1 does not come to the meeting.

    In the second, rank `first` comes before the other one.
    """
    limit = datetime.timedelta(seconds=100)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False, limit)
    dist.barrier()
    said = []
    for number in range(2):
        dist.destroy_process_group()
        own = dist.PrefixStore(f"torch/{number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=limit)
        stages = [PipelineStage(blocks(2)[rank], rank, 2, "cpu")]
        made = Schedule1F1B(stages, 2, loss_fn=mse, timeout=60.0 if number else 1.0)
        if number and rank != first:
            time.sleep(1.0)
        if number or rank == 0:
            with mock.patch.object(meeting, "default_store", return_value=store):
                try:
                    made.step(rand(4, 8), target=rand(4, 8))
                except RemoteStageError as error:
                    said.append(str(error))
    return said


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_to_meet_of_an_earlier_process_group_is_not_believed(first: int) -> None:
    # It stood under the same key: the second group failed with the words of the first.
    waited, absent = run_on_ranks(2, again_after_a_failure, first)

    assert len(waited) == 1 and "has not come to its first call" in waited[0]
    assert absent == []


def late_for_a_failure(rank: int) -> float:
    """Seconds after which rank 1 hears of what has happened before it came."""
    stages = [PipelineStage(blocks(2)[rank], rank, 2, "cpu")]
    made = Schedule1F1B(stages, 2, loss_fn=mse, timeout=60.0 if rank else 1.0)
    if rank:
        time.sleep(2.0)
    start = time.monotonic()
    with (
        mock.patch.object(board, "DOUBT", 0.5),
        pytest.raises(RemoteStageError, match="rank 1: TimeoutError: has not come to its first"),
    ):
        made.step(rand(4, 8), target=rand(4, 8))
    return time.monotonic() - start


def test_who_comes_late_hears_why_the_others_have_given_up() -> None:
    _, took = run_on_ranks(2, late_for_a_failure)

    assert took < 30.0  # of 60


def named_differently(rank: int) -> int:
    """Two groups whose ranks know them by different names, as torch names those of a mesh."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for place, group in enumerate(groups):
        group._set_group_name(hashlib.sha1(f"{rank} {place}".encode()).hexdigest())
        stages = [PipelineStage(blocks(2)[rank], rank, 2, "cpu", group=group)]
        made = Schedule1F1B(stages, 2, loss_fn=mse, timeout=60.0)
        made.step(rand(4, 8), target=rand(4, 8))
    return len({meeting.name_of(group) for group in groups})


def test_ranks_meet_that_know_their_group_by_different_names() -> None:
    # Each waited for the other under its own name, until the time-out.
    assert run_on_ranks(2, named_differently) == [2, 2]
