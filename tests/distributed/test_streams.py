"""Over communicators like NCCL's: the plain model's gradients, or a clear error soon."""

import contextlib
import copy
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import RemoteStageError, Schedule1F1B, ScheduleError, get_schedule_class
from fxpipe.runtime.control import group_control
from fxpipe.runtime.wire import communicators
from fxpipe.runtime.wire.stream_transport import StreamTransport
from tests.backends import nccl_like
from tests.backends.one_order import Posted, left_in_queues
from tests.distributed import bodies, test_data_parallel, test_faults
from tests.distributed.bodies import blocks, layout, mse, rand, stages_of
from tests.distributed.ranks import RankFailedError, answers_of_ranks, run_on_ranks
from tests.runtime.training import SCHEDULE_NAMES, assert_close

STREAMS = nccl_like.MODELS
SOON = 30.0  # the time-outs are longer; at once may be long on a busy machine


def on_streams(rank: int, body: Callable[..., Any], *args: Any) -> list[Posted]:
    """Run a body; its messages went over two communicators of our own, and no host waited."""
    nccl_like.instances()  # forget the user's
    body(rank, *args)
    own = [group for group in nccl_like.instances() if group.posted]
    assert len(own) == 2, "one communicator for activations, one for gradients"
    sizes = [len(group.posted) for group in own]  # a few connect the ranks, on both
    assert 10 * min(sizes) > sum(sizes), "gradients are among activations"
    world: Any = dist.group.WORLD
    is_split = world.bound_device_id is not None
    assert [group.parent is not None for group in own] == [is_split, is_split]
    assert [group.host_waits for group in own] == [0, 0]
    posted = [(when, lane, *what) for lane, group in enumerate(own) for when, *what in group.posted]
    return [(lane, is_send, peer) for _, lane, is_send, peer in sorted(posted)]


def run_on_streams(num_ranks: int, streams: str, body: Callable[..., Any], *args: Any) -> None:
    """Whatever the queues were: all that was posted would pass one queue per rank.

    Warm-up, values and gradients of tied parameters and routed inputs are among it.
    """
    posted = run_on_ranks(num_ranks, on_streams, body, *args, backend=f"nccl_{streams}")
    assert not left_in_queues(posted)


@pytest.mark.parametrize(
    ("schedule", "streams"),
    [(name, STREAMS[i % 4]) for i, name in enumerate(SCHEDULE_NAMES)],
)
def test_every_schedule_trains(schedule: str, streams: str) -> None:
    run_on_streams(3, streams, bodies.train_blocks, schedule, 3, 4)


@pytest.mark.full
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_schedule_on_every_model_of_streams(
    schedule: str, num_ranks: int, streams: str
) -> None:
    run_on_streams(num_ranks, streams, bodies.train_blocks, schedule, num_ranks, 5)


@pytest.mark.parametrize(
    ("model", "schedule", "style", "streams"),
    [
        # Its tied weights are on two ranks, unlike those of schedules that turn back.
        ("gpt", "Interleaved1F1B", "ranks", "rank"),
        ("encoder_decoder", "DualPipeV", "ranks", "pair"),
        ("gpt", "1F1B", "ranks", "eager"),
        ("unet", "Interleaved1F1B", "same", "eager"),
    ],
)
def test_ties_skips_and_routed_inputs(model: str, schedule: str, style: str, streams: str) -> None:
    run_on_streams(2, streams, bodies.train_model, model, schedule, 2, style)


@pytest.mark.full
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("style", ["same", "ranks"])
@pytest.mark.parametrize("model", ["gpt", "unet", "encoder_decoder", "moe"])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_models_on_every_model_of_streams(
    model: str, schedule: str, style: str, streams: str
) -> None:
    run_on_streams(2, streams, bodies.train_model, model, schedule, 2, style)


def ties_both_ways(rank: int) -> None:
    """Two tied weights, whose owners are different ranks."""
    modules: list[Any] = blocks(4)
    modules[3].linear.weight = modules[0].linear.weight
    modules[2].linear.weight = modules[1].linear.weight
    ties = [[(i, "linear.weight") for i in pair] for pair in ((0, 3), (1, 2))]
    stages = stages_of(modules, [rank, rank + 2])
    made = get_schedule_class("Interleaved1F1B")(stages, 4, loss_fn=mse, tied=ties, timeout=60.0)
    x, y = rand(8, 8), rand(8, 8, seed=2)
    plain: Any = copy.deepcopy(nn.Sequential(*modules))  # keeps what is shared
    made.step(x, target=y)
    mse(plain(x), y).backward()
    for i in (rank, rank + 2):
        assert_close(modules[i].linear.weight.grad, plain[i].linear.weight.grad, f"stage {i}")


@pytest.mark.parametrize("streams", ["rank", "eager"])
def test_tied_weights_with_owners_on_different_ranks(streams: str) -> None:
    # Ranks that took them in different orders waited for each other; one tie cannot show it.
    run_on_streams(2, streams, ties_both_ways)


def replicated(rank: int, schedule: str, wrapper: str, streams: str) -> None:
    nccl_like.register()
    test_data_parallel.two_by_two(rank, schedule, wrapper, f"nccl_{streams}")


def run_replicas(schedule: str, wrapper: str, streams: str) -> None:
    # Only a job of NCCL is bound to a device.
    job = "nccl_eager" if streams == "eager" else "gloo"
    run_on_ranks(4, replicated, schedule, wrapper, streams, backend=job)


@pytest.mark.parametrize(
    ("schedule", "wrapper", "streams"),
    [
        ("ZBVZeroBubble", "ddp", "rank"),
        ("Interleaved1F1B", "fsdp", "pair"),
        ("ZBVZeroBubble", "fsdp", "eager"),
    ],
)
def test_replicas(schedule: str, wrapper: str, streams: str) -> None:
    run_replicas(schedule, wrapper, streams)


@pytest.mark.full
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_replicas_on_every_model_of_streams(schedule: str, wrapper: str, streams: str) -> None:
    run_replicas(schedule, wrapper, streams)


# Communicators that are split from the group's


def two_schedules(rank: int) -> tuple[int, bool]:
    """How often the group was split for two schedules, and whether its ranks' order was kept."""
    turned: Any = dist.new_group([2, 0, 1], backend="nccl_eager", sort_ranks=False)
    nccl_like.instances()
    for schedule in ("1F1B", "ZBVZeroBubble"):
        indices, num_stages = layout(schedule, turned.rank(), 3)
        made = get_schedule_class(schedule)(
            stages_of(blocks(num_stages), indices, turned), 4, loss_fn=mse
        )
        made.step(rand(8, 8), target=rand(8, 8))
    own = nccl_like.instances()
    return len(turned.split), all(
        group.parent is turned and group.rank() == turned.rank() for group in own
    )


def test_a_group_is_split_once_and_its_order_is_kept() -> None:
    assert run_on_ranks(3, two_schedules, backend="nccl_eager") == [(2, True)] * 3


def not_split(rank: int) -> list[bool]:
    """Of a job that is bound to a device, but whose communicators cannot be split."""
    world: Any = dist.group.WORLD
    world.supports_splitting = False
    nccl_like.instances()
    bodies.train_blocks(rank, "1F1B", 2, 4)
    return [group.parent is None for group in nccl_like.instances()]


def test_a_group_that_cannot_be_split_gets_communicators_of_its_own() -> None:
    # torch refused to split them, on every rank and in every step: with
    # TORCH_DISTRIBUTED_DEBUG=DETAIL those of NCCL are wrapped in such a group.
    assert run_on_ranks(2, not_split, backend="nccl_eager") == [[True, True]] * 2


def lazy_ones(rank: int) -> tuple[str | None, str | None]:
    """The model of streams of "nccl-lazy", in a job that is bound to a device and in another."""
    world: Any = dist.group.WORLD
    world.name = lambda: "nccl-lazy"
    del world.streams
    found = [communicators.streams_of(world, torch.device("cpu"))]
    world.bound_device_id = None
    found.append(communicators.streams_of(world, torch.device("cpu")))
    return found[0], found[1]


def test_what_is_split_from_a_lazy_group_has_one_queue_per_rank() -> None:
    # It was taken for one queue per pair, so that late receives were let through, and deadlocked.
    assert run_on_ranks(1, lazy_ones, backend="nccl_eager") == [("rank", "pair")]


# Receives that are posted late


def late_receives(rank: int, schedule: str, receives: str, is_refused: bool) -> None:
    indices, num_stages = layout(schedule, rank, 3)
    stages = stages_of(blocks(num_stages), indices)
    made = get_schedule_class(schedule)(stages, 6, loss_fn=mse, receives=receives)
    if is_refused:
        with pytest.raises(ScheduleError, match=f"receives='{receives}' does not suit"):
            made.step(rand(12, 8), target=rand(12, 8))
    else:
        made.step(rand(12, 8), target=rand(12, 8))


@pytest.mark.parametrize(
    ("receives", "streams", "is_refused"),
    [
        ("late", "rank", True),
        ("late", "eager", True),
        ("late", "pair", False),
        ("late", "direction", False),
    ],
)
def test_receives_that_would_deadlock_are_refused(
    receives: str, streams: str, is_refused: bool
) -> None:
    body = (late_receives, "Interleaved1F1B", receives, is_refused)
    run_on_ranks(3, *body, backend=f"nccl_{streams}")


# Groups of users


def in_several_groups(rank: int) -> None:
    """Not all ranks of a pipeline are in as many groups, and the groups order them differently."""
    backend = dist.get_backend()
    turned = dist.new_group([2, 0, 1], backend=backend, sort_ranks=False)
    few = dist.new_group([1, 2], backend=backend)
    x, y = rand(8, 8), rand(8, 8, seed=2)
    made = []
    for group, schedule in ((None, "1F1B"), (turned, "Interleaved1F1B"), (few, "ZBVZeroBubble")):
        if group is few and rank == 0:
            continue
        place, size = (rank, 3) if group is None else (group.rank(), group.size())
        indices, num_stages = layout(schedule, place, size)
        modules = blocks(num_stages)
        stages = stages_of(modules, indices, group)
        kind = get_schedule_class(schedule)
        made.append((modules, indices, kind(stages, 4, loss_fn=mse, timeout=60.0)))
    for step in (1, 2):
        for modules, indices, schedule in made:
            reference, _ = bodies.plain_gradients(modules, x, y)
            schedule.step(x, target=y)
            for i in indices:
                for p, q in zip(modules[i].parameters(), reference[i].parameters(), strict=True):
                    assert_close(p.grad, step * q.grad, f"stage {i} of {num_stages}")


@pytest.mark.parametrize("streams", ["rank", "pair", "eager"])
def test_ranks_may_be_in_different_numbers_of_groups(streams: str) -> None:
    run_on_ranks(3, in_several_groups, backend=f"nccl_{streams}")


# Faults


OWNERS: dict[str, Any] = {
    "own_communicators": group_control,
    "connect": StreamTransport,
    "split_group": communicators,
}


def fails_to_connect(rank: int, where: str, way: str) -> None:
    """Rank 1 ends, fails or is late just where all ranks wait for each other, outside of Python."""

    def instead(*_: Any) -> Any:
        if way == "ends":
            os._exit(3)
        if way == "raises":
            raise MemoryError("no room for a communicator")
        time.sleep(8.0)
        raise MemoryError("too late")

    made = Schedule1F1B(stages_of(blocks(3), [rank]), 4, loss_fn=mse, timeout=60.0)
    if way == "is late":
        made = Schedule1F1B(stages_of(blocks(3), [rank]), 4, loss_fn=mse, timeout=4.0)
    owner: Any = OWNERS[where]
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(owner, where, instead))
        wanted = (MemoryError, RemoteStageError) if rank == 1 else RemoteStageError
        stack.enter_context(pytest.raises(wanted, match=r"no room|has ended|waited|no answer|late"))
        made.step(rand(8, 8), target=rand(8, 8))
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("where", OWNERS)
@pytest.mark.parametrize("way", ["ends", "raises", "is late"])
def test_a_rank_that_fails_while_all_connect_holds_up_nobody(where: str, way: str) -> None:
    # The others waited for an hour: the time-out of the communicators themselves.
    backend = "nccl_eager" if where == "split_group" else "nccl_pair"
    answers = answers_of_ranks(3, fails_to_connect, where, way, backend=backend)

    assert [is_ok for is_ok, _ in answers] == [True, way != "ends", True], answers


def tries_again(rank: int) -> str:
    """Rank 1 fails before it splits the group, while the others do: what its next call says."""

    def instead(*_: Any) -> Any:
        raise MemoryError("no room for a communicator")

    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(communicators, "split_group", instead))
        stack.enter_context(pytest.raises((MemoryError, RemoteStageError), match="no room"))
        made = Schedule1F1B(stages_of(blocks(3), [rank]), 4, loss_fn=mse, timeout=60.0)
        made.step(rand(8, 8), target=rand(8, 8))
    again = Schedule1F1B(stages_of(blocks(3), [rank]), 4, loss_fn=mse, timeout=60.0)
    with pytest.raises(RemoteStageError) as caught:
        again.step(rand(8, 8), target=rand(8, 8))
    return str(caught.value)


def test_a_group_that_some_ranks_still_split_is_not_split_again() -> None:
    # The next split of rank 1 was taken for the one that the others were waiting for since the call
    # that had failed, so ranks talked over different communicators.
    texts = run_on_ranks(3, tries_again, backend="nccl_eager")

    assert len(set(texts)) == 1
    assert "rank 0 still waits for the others to split" in texts[0]
    assert "start the job anew" in texts[0]


def longest_call(rank: int) -> list[float]:
    nccl_like.instances()
    for timeout in (30.0, 7200.0):
        made = Schedule1F1B(stages_of(blocks(2), [rank]), 4, loss_fn=mse, timeout=timeout)
        made.step(rand(8, 8), target=rand(8, 8))
    own = [group for group in nccl_like.instances() if group.posted]
    return [group.options._timeout.total_seconds() for group in own]


@pytest.mark.parametrize("streams", ["pair", "eager"])
def test_communicators_are_more_patient_than_any_call(streams: str) -> None:
    # Theirs was that of the first schedule: in a longer call of a later one, NCCL's ended the job.
    found = run_on_ranks(2, longest_call, backend=f"nccl_{streams}")

    assert all(len(own) == 2 and min(own) > 7200.0 for own in found), found


@pytest.mark.parametrize(("stage", "where"), [(1, "forward"), (0, "backward")])
def test_a_users_exception_reaches_all_ranks_and_the_next_step_works(
    stage: int, where: str
) -> None:
    body = (test_faults.fault_in_stage, Schedule1F1B, stage, where, 3)
    run_on_ranks(3, *body, backend="nccl_rank")


@pytest.mark.parametrize("body", [test_faults.lost_peer, test_faults.lost_inside])
def test_a_peer_that_dies_unnoticed_is_noticed(body: Callable[..., Any]) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_on_ranks(3, body, 2, 3, backend="nccl_rank")

    assert "rank 2: did not survive: exit code 3" in str(caught.value)
    assert str(caught.value).count("--- rank") == 1


def test_a_hang_says_who_waits_for_whom() -> None:
    texts = run_on_ranks(2, test_faults.hang, backend="nccl_rank")

    assert "no answer from rank 0" in texts[1]
    assert "rank 0: in action 0F0" in texts[1]


class Broken(nn.Module):
    """Its device breaks in the third forward: from then on no tensor can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.left = 1000

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            _break_device()
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.linear(x)


def _break_device() -> None:
    def zeros(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    torch.zeros = zeros


def broken_device(rank: int) -> None:
    modules = [*blocks(2), Broken()]
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse, timeout=60.0)
    made.step(rand(8, 8), target=rand(8, 8))
    modules[2].left = 2
    start, zeros = time.monotonic(), torch.zeros
    try:
        with pytest.raises(RuntimeError if rank == 2 else RemoteStageError, match="device-side"):
            made.step(rand(8, 8), target=rand(8, 8))
    finally:
        torch.zeros = zeros
    assert time.monotonic() - start < SOON


def test_a_broken_device_counts_as_lost_at_once() -> None:
    run_on_ranks(3, broken_device, backend="nccl_rank")
