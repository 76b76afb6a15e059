"""The emulated backend has the traps of NCCL, or the tests that use it would prove nothing."""

import datetime
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backends.nccl_like import MODELS
from tests.distributed.ranks import run_on_ranks


def send_meets_send(rank: int) -> tuple[bool, bool]:
    group: Any = dist.group.WORLD
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    works = [group.send([sent], 1 - rank), group.recv([received], 1 - rank)]
    if group.streams != "direction":
        time.sleep(0.3)
        done = works[1].is_completed()
        group.abort()
        works[1].wait()  # returns, and says nothing
        return done, bool(received.isnan().all())
    for work in works:  # a rank that left before its message was taken would leave its peer waiting
        work.wait()
    return works[1].is_completed(), received.tolist() == [1.0 - rank] * 3


@pytest.mark.parametrize("model", MODELS)
def test_two_sends_wait_for_each_other_unless_directions_have_queues(model: str) -> None:
    found = run_on_ranks(2, send_meets_send, backend=f"nccl_{model}")

    assert found == [(model == "direction", True)] * 2


def head_of_line(rank: int) -> bool:
    """Rank 0 waits for rank 2 first, which comes last; does its message to rank 1 wait, too?"""
    group: Any = dist.group.WORLD
    tensor, store = torch.zeros(1), dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.wait(["looked"])
        group.send([tensor], 0).wait()
        return True
    if rank == 1:
        group.recv([tensor], 0).wait()
        return True
    late, other = group.recv([tensor], 2), group.send([torch.ones(1)], 1)
    deadline = time.monotonic() + (0.3 if group.streams == "rank" else 60.0)
    while not other.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    passed = other.is_completed()
    store.set("looked", "yes")
    late.wait()
    other.wait()
    return bool(passed)


@pytest.mark.parametrize("model", MODELS)
def test_one_queue_per_rank_is_blocked_by_its_first_message(model: str) -> None:
    passed, *_ = run_on_ranks(3, head_of_line, backend=f"nccl_{model}")

    assert passed == (model not in ("rank", "eager"))


def read_late(rank: int) -> float:
    group: Any = dist.group.WORLD
    tensor, store = torch.zeros(1), dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = group.send([tensor], 1)
        tensor.fill_(7.0)  # a mistake: the message has not left yet
        store.set("changed", "yes")
        work.wait()
        return 7.0
    store.wait(["changed"])
    group.recv([tensor], 0).wait()
    return float(tensor)


def test_a_sent_tensor_is_read_when_the_receiver_is_there() -> None:
    assert run_on_ranks(2, read_late, backend="nccl_pair") == [7.0, 7.0]


def time_out(rank: int) -> str:
    group: Any = dist.group.WORLD
    if rank == 1:
        return "before timing out"
    with pytest.raises(RuntimeError) as caught:
        group.recv([torch.zeros(1)], 1).wait(datetime.timedelta(seconds=0.1))
    assert group.aborted.is_set()
    assert group.host_waits == 1
    return str(caught.value)


def test_a_time_out_on_the_host_aborts_in_the_words_of_nccl() -> None:
    assert all(
        "before timing out" in text for text in run_on_ranks(2, time_out, backend="nccl_rank")
    )


def split_in_two(rank: int) -> tuple[bool, str]:
    """Rank 1 comes late; then ranks 2 and 0 exchange their numbers, in a group that turns them."""
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        assert not store.check(["waited"])
        store.wait(["waiting"])
        store.set("waited", "yes")
        return group.split_group([2, 0], group_name="two") is None, "none"
    waits = threading.Timer(0.2, store.set, ("waiting", "yes"))
    waits.start()
    made = group.split_group([2, 0], group_name="two")
    waited = store.check(["waited"])
    assert (made.rank(), made.size(), made.streams) == ([2, 0].index(rank), 2, "rank")
    tensor = torch.full((2,), float(rank))
    if made.rank() == 0:
        made.send([tensor], 1).wait()
    else:
        made.recv([tensor], 0).wait()
    return waited, f"{tensor.tolist()}"


def test_a_group_is_split_by_all_of_its_ranks_and_keeps_the_given_order() -> None:
    found = run_on_ranks(3, split_in_two, backend="nccl_eager")

    assert found == [(True, "[2.0, 2.0]"), (True, "none"), (True, "[2.0, 2.0]")]


def split_unbound(rank: int) -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(RuntimeError, match="not initialized"):
        group.split_group([0], group_name="one")


def test_a_group_that_is_not_connected_cannot_be_split() -> None:
    run_on_ranks(1, split_unbound, backend="nccl_rank")
