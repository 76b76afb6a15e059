"""Whatever goes wrong on one rank, every rank says so within seconds, and can go on."""

import copy
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fxpipe import (
    InputError,
    PipelineStage,
    RemoteStageError,
    Schedule1F1B,
    ScheduleError,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from fxpipe.runtime.control import group_control
from fxpipe.runtime.step_run import StepRun
from fxpipe.runtime.wire.sockets import LARGEST
from tests.distributed.bodies import (
    blocks,
    by_group_alone,
    layout,
    mse,
    plain_gradients,
    rand,
    stages_of,
)
from tests.distributed.ranks import RankFailedError, answers_of_ranks, run_on_ranks
from tests.runtime.training import assert_close

SOON = 30.0  # who is told nothing waits for minutes; at once may be long on a busy machine

WAYS: dict[str, tuple[Any, ...]] = {"sockets": (), "group": (by_group_alone,)}


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, owner: "Faulty") -> Tensor:  # type: ignore[no-untyped-def]
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        ctx.owner.maybe_raise("backward")
        return grad, None


class Faulty(nn.Module):
    """A linear layer that raises in its third forward or backward once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.armed = ""
        self.calls = 0

    def maybe_raise(self, where: str) -> None:
        if self.armed == where:
            self.calls += 1
            if self.calls == 3:
                raise KeyError("the user's bug 4711")

    def forward(self, x: Tensor) -> Tensor:
        self.maybe_raise("forward")
        return Bomb.apply(torch.tanh(self.linear(x)), self)


def fault_in_stage(rank: int, schedule: type, faulty_stage: int, where: str, num_ranks: int) -> str:
    indices, num_stages = layout(schedule.schedule_name, rank, num_ranks)
    modules = blocks(num_stages)
    modules[faulty_stage] = Faulty()
    x, y = rand(8, 8), rand(8, 8, seed=2)
    made = schedule(stages_of(modules, indices), 4, loss_fn=mse)
    made.step(x, target=y)
    modules[faulty_stage].armed = where

    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        made.step(x, target=y)

    assert time.monotonic() - start < SOON
    error = caught.value
    if faulty_stage in indices:
        assert type(error) is KeyError
        text = "\n".join(error.__notes__)
    else:
        assert type(error) is RemoteStageError
        assert "the user's bug 4711" in str(error)
        assert error.stage == faulty_stage
        assert error.microbatch == 2
        text = str(error)
    assert f"stage {faulty_stage}" in text
    assert "microbatch 2" in text

    # Nothing is left on the wires: the same schedule and a new one both work.
    modules[faulty_stage].armed = ""
    for again in (made, schedule(stages_of(modules, indices), 4, loss_fn=mse)):
        for module in modules:
            module.zero_grad()
        reference, _ = plain_gradients(modules, x, y)
        again.step(x, target=y)
        for i in indices:
            for p, q in zip(modules[i].parameters(), reference[i].parameters(), strict=True):
                assert_close(p.grad, q.grad, f"stage {i} after the fault")
    return text


@pytest.mark.parametrize(
    ("schedule", "stage", "where", "ranks"),
    [
        (Schedule1F1B, 0, "forward", 3),
        (Schedule1F1B, 1, "forward", 3),
        (Schedule1F1B, 2, "backward", 3),
        (Schedule1F1B, 0, "backward", 3),
        (ScheduleZBVZeroBubble, 2, "forward", 2),
        (ScheduleZBVZeroBubble, 1, "backward", 2),
    ],
)
def test_an_exception_in_a_stage_reaches_all_ranks(
    schedule: type, stage: int, where: str, ranks: int
) -> None:
    run_on_ranks(ranks, fault_in_stage, schedule, stage, where, ranks)


@pytest.mark.parametrize(("stage", "where"), [(1, "forward"), (0, "backward")])
def test_an_exception_reaches_all_ranks_by_the_group_alone(stage: int, where: str) -> None:
    run_on_ranks(3, by_group_alone, fault_in_stage, Schedule1F1B, stage, where, 3)


def fault_in_loss(rank: int) -> None:
    modules = blocks(2)
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(1)
        if len(seen) == 3:
            raise ValueError("no loss today")
        return mse(output, target)

    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=loss)
    with pytest.raises((ValueError, RemoteStageError), match="no loss today"):
        made.step(rand(8, 8), target=rand(8, 8))
    made.step(rand(8, 8), target=rand(8, 8))


def test_an_exception_in_the_loss_reaches_all_ranks() -> None:
    run_on_ranks(2, fault_in_loss)


def slow_last_backward(rank: int) -> None:
    # Rank 1 is done when rank 0 fails in its very last backward; it must not return happily.
    modules = blocks(2)
    modules[0] = Faulty()
    made = Schedule1F1B(stages_of(modules, [rank]), 3, loss_fn=mse)
    made.step(rand(6, 8), target=rand(6, 8))
    modules[0].armed = "backward"
    with pytest.raises((KeyError, RemoteStageError), match="4711"):
        made.step(rand(6, 8), target=rand(6, 8))


def test_a_fault_after_a_rank_is_done_still_reaches_it() -> None:
    run_on_ranks(2, slow_last_backward)


def microbatch_counts_differ(rank: int) -> None:
    made = Schedule1F1B(stages_of(blocks(2), [rank]), 4 + rank, loss_fn=mse)
    with pytest.raises(ScheduleError, match=r"number of microbatches: 4 on rank 0, 5 on rank 1"):
        made.step(rand(20, 8), target=rand(20, 8))


def test_different_numbers_of_microbatches_are_named_on_all_ranks() -> None:
    run_on_ranks(2, microbatch_counts_differ)


def calls_differ(rank: int) -> None:
    made = Schedule1F1B(stages_of(blocks(2), [rank]), 4, loss_fn=mse)
    with pytest.raises(InputError, match=r"rank 0 calls step\(\), rank 1 calls eval\(\)"):
        (made.eval if rank else made.step)(rand(8, 8), target=rand(8, 8))
    made.step(rand(8, 8), target=rand(8, 8))
    text = r"rank 0 calls clip_grad_norm_\(\), rank 1 calls step\(\)"
    with pytest.raises(InputError, match=text):
        made.step(rand(8, 8), target=rand(8, 8)) if rank else made.clip_grad_norm_(1.0)
    made.record_timeline(rank == 0)  # on one rank only: its own business
    made.step(rand(8, 8), target=rand(8, 8))


def test_step_on_one_rank_and_eval_on_another_is_refused() -> None:
    run_on_ranks(2, calls_differ)


def bad_inputs(rank: int) -> None:
    made = Schedule1F1B(stages_of(blocks(2), [rank]), 4, loss_fn=mse)
    x = rand(8, 8)
    with pytest.raises(InputError, match="target"):
        made.step(x)
    with pytest.raises(InputError, match=r"batch of 3 rows .* 4 microbatches"):
        made.step(*(() if rank else (x[:3],)), target=rand(3, 8))
    with pytest.raises(InputError, match="no stage takes the keyword input 'mask'"):
        made.step(x, target=x, mask=x)
    with pytest.raises(InputError, match="8 rows on rank 0, but rank 1 passes 6"):
        made.step(x[: 8 - 2 * rank], target=x)
    with pytest.raises(InputError, match="no_grad"), torch.no_grad():
        made.step(x, target=x)
    made.step(x, target=x)


def test_bad_inputs_on_one_rank_are_refused_on_all() -> None:
    run_on_ranks(2, bad_inputs)


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.seconds = seconds
        self.is_slow = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_slow:
            time.sleep(self.seconds)
        return self.linear(x)


def hang(rank: int) -> str:
    modules = [Sleeper(8.0), blocks(1)[0]]
    made = Schedule1F1B(stages_of(modules, [rank]), 2, loss_fn=mse, timeout=2.0)
    made.step(rand(8, 8), target=rand(8, 8))
    modules[0].is_slow = True
    with pytest.raises(RemoteStageError) as caught:
        made.step(rand(8, 8), target=rand(8, 8))
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_hang_says_who_waits_for_whom(way: str) -> None:
    texts = run_on_ranks(2, *WAYS[way], hang)

    assert "no answer from rank 0" in texts[1]
    assert "rank 0: in action 0F0" in texts[1]
    assert "rank 1: in action 1F0" in texts[1]


def lost_peer(rank: int, lost: int, num_ranks: int) -> str:
    modules = blocks(num_ranks)
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse)
    made.step(rand(8, 8), target=rand(8, 8))
    if rank == lost:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(RemoteStageError) as caught:
        made.step(rand(8, 8), target=rand(8, 8))
    assert time.monotonic() - start < SOON
    return str(caught.value)


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_process_is_noticed_by_all_others(lost: int, way: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_on_ranks(4, *WAYS[way], lost_peer, lost, 4)

    # Only the process that died is missing; the others raised as they should.
    assert f"rank {lost}: did not survive: exit code 3" in str(caught.value)
    assert str(caught.value).count("--- rank") == 1


def much_to_drain(rank: int) -> None:
    """Rank 0 fails and owes more than sockets hold; its next exchange goes over the group."""
    modules: list[Any] = [Faulty(), Sleeper(0.5)]
    stages = stages_of(modules, [rank])
    x = rand(16 * LARGEST // 64, 8)
    with mock.patch.object(group_control, "_FEW", 0):
        made = Schedule1F1B(stages, 16, loss_fn=mse, timeout=20.0)
        found = made.eval(x)
        modules[0].armed, modules[1].is_slow = "forward", True
        with pytest.raises((KeyError, RemoteStageError), match="4711"):
            made.eval(x)
        modules[0].armed, modules[1].is_slow = "", False
        again = made.eval(x)
    if rank:
        assert torch.equal(found, again)


def test_a_rank_that_fails_waits_until_all_that_it_owes_has_left() -> None:
    # In the exchange that follows it writes and reads nothing else: the other one would wait.
    run_on_ranks(2, much_to_drain)


class Mortal(nn.Module):
    """Ends its process in its third forward once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.left = 1000

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            os._exit(3)
        return self.linear(x)


def lost_inside(rank: int, lost: int, num_ranks: int) -> None:
    modules = blocks(num_ranks)
    modules[lost] = Mortal()
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse)
    made.step(rand(8, 8), target=rand(8, 8))
    modules[lost].left = 3
    start = time.monotonic()
    with pytest.raises(RemoteStageError, match=f"rank {lost}|lost"):
        made.step(rand(8, 8), target=rand(8, 8))
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_process_lost_inside_a_step_is_noticed_by_all_others(lost: int, way: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_on_ranks(4, *WAYS[way], lost_inside, lost, 4)

    assert f"rank {lost}: did not survive: exit code 3" in str(caught.value)
    assert str(caught.value).count("--- rank") == 1


def lost_with_the_store(rank: int) -> float:
    """Seconds in which the loss of rank 0 is noticed; rank 1 keeps its schedule for long."""
    modules = [Mortal(), *blocks(3)[1:]]
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse, timeout=60.0)
    made.step(rand(8, 8), target=rand(8, 8))
    modules[0].left = 3
    start = time.monotonic()
    with pytest.raises(RemoteStageError, match="rank 0"):
        made.step(rand(8, 8), target=rand(8, 8))
    took = time.monotonic() - start
    if rank == 1:
        time.sleep(20.0)
    return took


def test_who_knows_of_a_loss_and_cannot_say_so_wakes_the_others() -> None:
    # Rank 2 waits for rank 1 alone, and with rank 0 the store is gone: a connection that ends is
    # the only word that is left.
    lost, *others = answers_of_ranks(3, lost_with_the_store, holds_store=True)

    assert not lost[0]
    assert all(is_ok and took < 15.0 for is_ok, took in others), others


def wrong_stages(rank: int) -> None:
    modules = blocks(2)
    made = Schedule1F1B([PipelineStage(modules[0], 0, 2, "cpu")], 4, loss_fn=mse)
    with pytest.raises(ScheduleError, match=r"rank 1 must hold the stages \[1\].*was given \[0\]"):
        made.step(rand(8, 8), target=rand(8, 8))


def test_a_stage_on_the_wrong_rank_is_named_on_all_ranks() -> None:
    run_on_ranks(2, wrong_stages)


class Crossed(nn.Module):
    """In a V on two ranks each rank owns a tied weight, and both need the second input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(4))
        self.layers[2].weight, self.layers[3].weight = self.layers[0].weight, self.layers[1].weight

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x


def fails_around_the_program(rank: int, point: str) -> tuple[int, int]:
    """Rank 1 fails before its routed inputs, in its program, or before its tied gradients."""
    model, x, y, scale = Crossed(), rand(8, 8), rand(8, 8, seed=2), rand(8, 1, seed=3)
    plain = copy.deepcopy(model)
    mse(plain(x, scale), y).backward()
    spec = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    pipe = pipeline(model, (x[:2],), {"scale": scale[:2]}, split_spec=spec)
    stages = [pipe.build_stage(i, "cpu") for i in ((0, 3), (1, 2))[rank]]
    made = ScheduleZBVZeroBubble(stages, 4, loss_fn=mse)
    args, given = ((x,), {"scale": scale, "target": y}) if rank == 0 else ((), {})
    made.step(*args, **given)
    assert len(made._session.plan.routes) == 1
    assert {group.owner for group in made._session.plan.tied} == {0, 1}
    before = made._session._control._sequence

    places = {"inputs": "_prepare", "program": "_outcome", "ties": "_add_up_tied"}
    if rank == 1:
        with (
            mock.patch.object(StepRun, places[point], side_effect=KeyError("4711")),
            pytest.raises(KeyError),
        ):
            made.step()
    else:
        with pytest.raises(RemoteStageError, match="4711"):
            made.step(*args, **given)
    after = made._session._control._sequence

    for stage in stages:
        stage.submod.zero_grad()
    made.step(*args, **given)
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, p in stage.submod.named_parameters(remove_duplicate=False):
            assert_close(p.grad, wanted[name].grad, f"{name} after the fault")
    return after - before, made._session._control._sequence - after


@pytest.mark.parametrize("backend", ["gloo", "nccl_rank"])
@pytest.mark.parametrize("point", ["inputs", "program", "ties"])
def test_a_fault_beside_routed_inputs_and_tied_weights_leaves_nothing(
    point: str, backend: str
) -> None:
    counts = run_on_ranks(2, fails_around_the_program, point, backend=backend)

    # One exchange to agree and one to confirm; in the first calls one compares tied copies.
    assert counts == [(3, 3), (3, 3)]
