"""Pipelines side by side: DDP and FSDP2 stages average over the replicas in every schedule."""

import contextlib
import copy
import datetime
import gc
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxpipe import (
    InputError,
    PipelineStage,
    RemoteStageError,
    Schedule1F1B,
    ScheduleError,
    ScheduleInterleaved1F1B,
    aux_loss,
    collect_aux_losses,
    get_schedule_class,
    pipeline,
)
from fxpipe.runtime.control.ballot import BALLOTS, Ballot, SilentReplicaError, ballot_of
from fxpipe.runtime.parameters.ddp import DdpSync
from fxpipe.runtime.parameters.fsdp import FsdpSync
from fxpipe.runtime.parameters.replicas import Replicas
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.torch_inside import default_store
from tests.distributed import test_faults
from tests.distributed.bodies import blocks, layout, mse, plain_gradients, rand
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import assert_close

WRAPPERS = ("module.", "_orig_mod.")


def two_by_two(rank: int, schedule: str, wrapper: str, backend: str = "gloo") -> None:
    """Two pipelines of two ranks on other rows each; the reference is one model on all rows."""
    pp = [dist.new_group([0, 1], backend=backend), dist.new_group([2, 3], backend=backend)]
    dp = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1, 3], backend="gloo")]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout(schedule, place, 2)
    modules = blocks(num_stages)
    x, y = rand(16, 8), rand(16, 8, seed=2)
    reference, output = plain_gradients(modules, x, y)
    wrapped = {i: wrap(modules[i], wrapper, dp[place]) for i in indices}
    stages = [PipelineStage(wrapped[i], i, num_stages, "cpu", group=pp[replica]) for i in indices]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=mse)
    rows = slice(8 * replica, 8 * replica + 8)
    for step in (1, 2):  # the second one accumulates
        found = made.step(x[rows], target=y[rows])
        if num_stages - 1 in indices:
            assert_close(found, output[rows], "output")
        for i in indices:
            wanted = dict(reference[i].named_parameters())
            for name, p in wrapped[i].named_parameters():
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                assert_close(grad, step * wanted[plain(name)].grad, f"stage {i} {name}")
    evaluated = made.eval(x[rows])
    if num_stages - 1 in indices:
        assert_close(evaluated, output[rows], "evaluation")
    norm = made.clip_grad_norm_(1e9)
    every = [2 * p.grad for module in reference for p in module.parameters()]
    expected = torch.nn.utils.get_total_norm(every)
    assert_close(norm.double(), expected, f"norm {norm} {expected}")


def wrap(module: nn.Module, wrapper: str, group: dist.ProcessGroup) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(module, process_group=group)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    if wrapper == "fsdp parts":  # the usual way: FSDP2 would free and gather each of them again
        for part in module.children():
            fully_shard(part, mesh=mesh)
    sharded: nn.Module = fully_shard(module, mesh=mesh)
    return sharded


def plain(name: str) -> str:
    for prefix in WRAPPERS:
        name = name.removeprefix(prefix)
    return name


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_ddp_stages_average_over_replicas(schedule: str) -> None:
    run_on_ranks(4, two_by_two, schedule, "ddp")


class Skipping(nn.Module):
    """Uses its second layer only where told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.uses_extra = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return h + self.extra(h) if self.uses_extra else h


def used_by_some(rank: int, schedule: str, wrapper: str) -> None:
    """Layers that no replica uses, that one uses, and that none uses any more."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout(schedule, place, 2)
    modules: list[Any] = [Skipping() for _ in range(num_stages)]
    reference = copy.deepcopy(modules)
    wrapped = {i: wrap(modules[i], wrapper, dp[place]) for i in indices}
    stages = [PipelineStage(wrapped[i], i, num_stages, "cpu", group=pp[replica]) for i in indices]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=mse)
    x, y = rand(16, 8), rand(16, 8, seed=2)
    halves = (slice(0, 8), slice(8, 16))
    for users in ((), (1,), (), (0, 1)):
        for module in modules:
            module.uses_extra = replica in users
        made.step(x[halves[replica]], target=y[halves[replica]])
        for one, rows in enumerate(halves):
            h = x[rows]
            for module in reference:
                module.uses_extra = one in users
                h = module(h)
            (mse(h, y[rows]) / 2).backward()
        for i in indices:
            wanted = dict(reference[i].named_parameters())
            for name, p in wrapped[i].named_parameters():
                what = f"stage {i} {name}, used by {users}"
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                want = wanted[plain(name)].grad
                assert (grad is None) == (want is None), what
                if want is not None:
                    assert_close(grad, want, what)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp parts"])
def test_what_no_replica_has_used_has_no_new_gradient(wrapper: str, schedule: str) -> None:
    # Optimizers with momentum or decay move a parameter whose gradient is zero, not one without.
    run_on_ranks(4, used_by_some, schedule, wrapper)


class Counted(nn.Module):
    """A layer whose buffer depends on the rows that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.detach().sum(0)
        return torch.tanh(self.linear(x))


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).pow(2).sum(), target.numel()


def accumulate_without_sync(rank: int, case: str) -> None:
    """A step under no_sync(), then one that averages both; buffers are the first replica's."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    torch.manual_seed(0)
    modules: list[nn.Module] = [Counted(), Counted()]
    if case == "tied":
        modules[1].linear.weight = modules[0].linear.weight
    reference = copy.deepcopy(modules)
    wrapped = wrap(modules[place], "ddp", dp[place])
    made = Schedule1F1B(
        [PipelineStage(wrapped, place, 2, "cpu", group=pp[replica])],
        4,
        loss_fn=weighted if case == "pair" else mse,
        tied=[[(0, "linear.weight"), (1, "linear.weight")]] if case == "tied" else [],
    )
    batches = [(rand(16, 8, seed=s), rand(16, 8, seed=s + 10)) for s in (1, 2, 3)]
    rows = slice(8 * replica, 8 * replica + 8)
    for i, (x, y) in enumerate(batches):
        with wrapped.no_sync() if i < 2 else contextlib.nullcontext():
            made.step(x[rows], target=y[rows])
        mse(reference[1](reference[0](x)), y).backward()

    for p, q in zip(wrapped.parameters(), reference[place].parameters(), strict=True):
        assert_close(p.grad, q.grad, f"{case} gradient")
    first = torch.zeros(8, dtype=torch.float64)
    for x, _ in batches:
        half = x[:8]
        first += (half if place == 0 else reference[0](half).detach()).sum(0)
    assert_close(wrapped.module.seen, first, "buffer")


@pytest.mark.parametrize("case", ["plain", "tied", "pair"])
def test_steps_without_sync_are_averaged_by_the_next_one(case: str) -> None:
    run_on_ranks(4, accumulate_without_sync, case)


def accumulate_unreduced(rank: int, schedule: str, wrapper: str, case: str) -> None:
    """Two steps without reduction, then one that reduces all three; a step between them fails."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout(schedule, place, 2)
    modules = blocks(num_stages)
    modules[0] = Faulty()
    tied = [[(1, "linear.weight"), (num_stages - 1, "linear.weight")]] if case == "tied" else []
    if tied:
        modules[-1].linear.weight = modules[1].linear.weight
    reference = copy.deepcopy(nn.ModuleList(modules))
    wrapped = {i: wrap(modules[i], wrapper, dp[place]) for i in indices}
    stages = [PipelineStage(wrapped[i], i, num_stages, "cpu", group=pp[replica]) for i in indices]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=mse, tied=tied)
    rows = slice(8 * replica, 8 * replica + 8)
    for round_ in (1, 2):  # the second adds to what the first has reduced
        for i in range(3):
            x, y = rand(16, 8, seed=i), rand(16, 8, seed=i + 10)
            if i == 1:
                modules[0].armed = replica == 1
                with pytest.raises((KeyError, RemoteStageError), match="only this replica's bug"):
                    made.step(x[rows], target=y[rows], finalize_gradients=False)
                modules[0].armed = False
            made.step(x[rows], target=y[rows], finalize_gradients=i == 2)
            h = x
            for module in reference:
                h = module(h)
            mse(h, y).backward()
            if i < 2 and wrapper == "fsdp" and round_ == 1 and not tied:
                assert all(p.grad is None for one in wrapped.values() for p in one.parameters())
            made.eval(x[rows])
        for i in indices:
            wanted = dict(reference[i].named_parameters(remove_duplicate=False))
            for name, p in wrapped[i].named_parameters(remove_duplicate=False):
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                assert_close(grad, wanted[plain(name)].grad, f"round {round_}, stage {i} {name}")


@pytest.mark.parametrize(
    ("schedule", "wrapper", "case"),
    [
        ("1F1B", "ddp", "plain"),
        ("ZBVZeroBubble", "fsdp", "plain"),
        ("Interleaved1F1B", "fsdp", "tied"),
    ],
)
def test_steps_that_do_not_finalize_are_reduced_by_the_next_one(
    schedule: str, wrapper: str, case: str
) -> None:
    run_on_ranks(4, accumulate_unreduced, schedule, wrapper, case)


def weighted_unreduced(rank: int) -> None:
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    wrapped = wrap(blocks(2)[place], "fsdp", dp[place])
    stage = PipelineStage(wrapped, place, 2, "cpu", group=pp[replica])
    made = Schedule1F1B(stage, 4, loss_fn=weighted)
    with pytest.raises(InputError, match="each step is divided by its own weight"):
        made.step(rand(8, 8), target=rand(8, 8), finalize_gradients=False)
    made.step(rand(8, 8), target=rand(8, 8))
    with pytest.raises(ScheduleError, match="finalize_gradients: True on rank 0, False on rank 1"):
        made.step(rand(8, 8), target=rand(8, 8), finalize_gradients=place == 0)


def test_weighted_losses_of_unreduced_shards_are_refused_and_ranks_that_differ() -> None:
    run_on_ranks(4, weighted_unreduced)


def side_by_side(rank: int, wrapper: str, **options: Any) -> tuple[list[nn.Module], Any]:
    """Two pipelines of two ranks with two stages each, which are replicas; plain modules, too."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout("Interleaved1F1B", place, 2)
    modules = blocks(num_stages)
    wrapped = [wrap(modules[i], wrapper, dp[place]) for i in indices]
    stages = [
        PipelineStage(module, i, num_stages, "cpu", group=pp[replica])
        for i, module in zip(indices, wrapped, strict=True)
    ]
    return wrapped, ScheduleInterleaved1F1B(stages, 4, loss_fn=mse, max_unsharded=1, **options)


def votes(rank: int, wrapper: str) -> int:
    """How many exchanges of replicas end in a step on a rank with two stages."""
    _, made = side_by_side(rank, wrapper)
    made.step(rand(8, 8), target=rand(8, 8))
    with mock.patch.object(Ballot, "vote", autospec=True, side_effect=Ballot.vote) as asked:
        made.step(rand(8, 8), target=rand(8, 8))
    return asked.call_count


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_replicas_vote_once_per_step(wrapper: str) -> None:
    # There used to be one exchange before each collective: here ten with fsdp, two with ddp.
    assert run_on_ranks(4, votes, wrapper) == [1] * 4


def raise_in_hook(_: torch.Tensor) -> None:
    raise RuntimeError("the hook does not like it")


def differing_replicas(rank: int, wrapper: str, way: str) -> None:
    """What only one replica does is told to all before anything is reduced; then all go on."""
    wrapped, made = side_by_side(rank, wrapper, timeout=60.0)
    x, y, is_odd = rand(8, 8), rand(8, 8, seed=2), rank == 2
    parameter = next(wrapped[0].parameters())
    made.step(x, target=y)
    expected = [p.grad.clone() for module in wrapped for p in module.parameters()]
    handle, words, finalizes = None, "must reduce the same gradients", True
    if way == "frozen":
        parameter.requires_grad_(not is_odd)
        words += r"[^$]*replica 1: reduces the gradients of 1 of 2 parameters .not .*weight"
    elif way == "unreduced":
        finalizes = rank < 2
        words += r"[^$]*replica 1: does not reduce the gradients of all 2 parameters"
    else:
        handle = parameter.register_post_accumulate_grad_hook(raise_in_hook) if is_odd else None
        words = "the hook does not like it"

    start = time.monotonic()
    with pytest.raises(Exception, match=words):
        made.step(x, target=y, finalize_gradients=finalizes)

    assert time.monotonic() - start < 30.0
    parameter.requires_grad_(True)
    if handle is not None:
        handle.remove()
    for module in wrapped:
        for p in module.parameters():
            p.grad = None
    made.step(x, target=y)
    found = [p.grad for module in wrapped for p in module.parameters()]
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, "the step after")


@pytest.mark.parametrize("way", ["frozen", "unreduced", "hook"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_what_one_replica_does_otherwise_is_told_to_all_and_they_go_on(
    wrapper: str, way: str
) -> None:
    # Unequal buckets ended the process; a hook of a sharded parameter left the others waiting.
    run_on_ranks(4, differing_replicas, wrapper, way)


def late_replica(rank: int, wrapper: str, call: str) -> None:
    world = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])]
    wrapped = wrap(blocks(1)[0], wrapper, world)
    stage = PipelineStage(wrapped, 0, 1, "cpu", group=alone[rank])
    made = Schedule1F1B([stage], 2, loss_fn=mse, timeout=2.0)
    made.step(rand(8, 8), target=rand(8, 8))
    store = default_store()
    if rank == 1:  # what the other has sent before it gave up would be enough for a step
        with contextlib.suppress(RuntimeError):
            store.wait(["the other gave up"], datetime.timedelta(seconds=40))
    start = time.monotonic()
    with pytest.raises(RemoteStageError, match="did not answer"):
        getattr(made, call)(rand(8, 8), target=rand(8, 8))
    assert time.monotonic() - start < 30.0  # the group's own limit is 150
    store.set("the other gave up", "")
    with pytest.raises(RemoteStageError, match=r"did not answer[^$]*make (the groups anew|a new)"):
        made.step(rand(8, 8), target=rand(8, 8))


@pytest.mark.parametrize("wrapper, call", [("ddp", "step"), ("fsdp", "step"), ("fsdp", "eval")])
def test_a_replica_that_is_late_is_not_waited_for_longer_than_the_timeout(
    wrapper: str, call: str
) -> None:
    run_on_ranks(2, late_replica, wrapper, call)


def slower_than_the_group(rank: int, wrapper: str) -> str:
    """What a replica is told that waits longer than the limit of the user's own group."""
    shared = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1.5))
    alone = [dist.new_group([0]), dist.new_group([1])]
    module = blocks(1)[0]
    stage = PipelineStage(wrap(module, wrapper, shared), 0, 1, "cpu", group=alone[rank])
    made = Schedule1F1B([stage], 2, loss_fn=mse, timeout=60.0)
    made.step(rand(8, 8), target=rand(8, 8))
    if rank == 1:
        module.register_forward_pre_hook(lambda *_: time.sleep(1.5))
    with pytest.raises(RemoteStageError, match="did not answer") as caught:
        made.step(rand(8, 8), target=rand(8, 8))
    return str(caught.value)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_limit_of_the_replicas_own_group_is_named(wrapper: str) -> None:
    # The text was gloo's alone, though the schedule's own timeout was not over.
    waiting, _ = run_on_ranks(2, slower_than_the_group, wrapper)

    assert "Timed out waiting 1500ms" in waiting
    assert "make that group with a longer timeout" in waiting


def cannot_begin(rank: int, wrapper: str, what: str) -> None:
    _, made = side_by_side(rank, wrapper, timeout=60.0)
    x, y = rand(8, 8), rand(8, 8, seed=2)
    made.step(x, target=y)
    kinds: dict[str, type] = {"ddp": DdpSync, "fsdp": FsdpSync}
    place = (Replicas, "_open") if what == "vote" else (kinds[wrapper], "begin")
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if rank == 2:
            stack.enter_context(mock.patch.object(*place, no_memory))
        stack.enter_context(pytest.raises((MemoryError, RemoteStageError), match=r"no room|answer"))
        made.step(x, target=y)
    assert time.monotonic() - start < 30.0
    with pytest.raises(RemoteStageError, match=r"make the groups anew|make a new schedule"):
        made.step(x, target=y)
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("what", ["sync", "vote"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_replica_that_cannot_begin_a_step_wakes_the_others(wrapper: str, what: str) -> None:
    # It had no collectives to make, told nobody, and the others waited for the timeout. One that
    # had compared nothing took that for a yes, and reduced alone.
    run_on_ranks(4, cannot_begin, wrapper, what)


def reshards_alone(rank: int) -> bool:
    """Whether a part is sharded again after a forward that the user makes between steps."""
    shared = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])]
    module = blocks(1)[0]
    wrapped = wrap(module, "fsdp parts", shared)
    made = Schedule1F1B(
        [PipelineStage(wrapped, 0, 1, "cpu", group=alone[rank])], 2, loss_fn=mse, timeout=60.0
    )
    made.step(rand(8, 8), target=rand(8, 8))
    with torch.no_grad():
        wrapped(rand(8, 8))
    return hasattr(module.linear.weight, "device_mesh")


def test_a_user_s_own_forward_frees_what_it_gathers() -> None:
    # A step keeps forwards from freeing anything, and has to say when that is over.
    assert run_on_ranks(2, reshards_alone) == [True, True]


def freed_after_silence(rank: int) -> float:
    """Seconds to free the group of a vote that was never answered; the group's own limit is 150."""
    world = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])]
    wrapped = wrap(blocks(1)[0], "ddp", world)
    made = Schedule1F1B(
        [PipelineStage(wrapped, 0, 1, "cpu", group=alone[rank])], 2, loss_fn=mse, timeout=1.0
    )
    made.step(rand(8, 8), target=rand(8, 8))
    if rank == 0:
        deadline = Deadline(1.0)
        with pytest.raises(SilentReplicaError, match="did not answer within 1 s"):
            ballot_of(world, deadline).vote([True], deadline)
        start = time.monotonic()
        BALLOTS.pop(world)
        gc.collect()
        return time.monotonic() - start
    return 0.0


def test_a_vote_that_was_given_up_does_not_hold_up_who_frees_its_group() -> None:
    # The collector ran in a later step and stood still for the group's own limit: its peers waited.
    assert max(run_on_ranks(2, freed_after_silence)) < 20.0


def first_step_fails(rank: int, wrapper: str) -> None:
    """One replica fails before it has a plan: the other is told, and both go on."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    wrapped = wrap(blocks(2)[place], wrapper, dp[place])
    made = Schedule1F1B(
        [PipelineStage(wrapped, place, 2, "cpu", group=pp[replica])], 4, loss_fn=mse, timeout=60.0
    )
    few = 3 if replica == 1 else 8
    start = time.monotonic()
    with pytest.raises((InputError, RemoteStageError), match="4 microbatches"):
        made.step(rand(8, 8)[:few], target=rand(8, 8)[:few])
    assert time.monotonic() - start < 30.0

    made.step(rand(8, 8), target=rand(8, 8))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp parts"])
def test_a_replica_that_fails_in_its_first_step_tells_the_others(wrapper: str) -> None:
    # Sharded modules that have not run could not reduce, and each forward gathered parts again
    # that the failed replica did not: processes ended in gloo, or all waited for the timeout.
    run_on_ranks(4, first_step_fails, wrapper)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_fsdp_stages_average_over_replicas(schedule: str) -> None:
    run_on_ranks(4, two_by_two, schedule, "fsdp")


def mixed_precision(rank: int, schedule: str, is_traced: bool) -> None:
    """FSDP2 with bfloat16 parameters and float32 gradients, close to the plain float32 model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout(schedule, place, 2)
    modules = [block.float() for block in blocks(num_stages)]
    x, y = rand(16, 8).float(), rand(16, 8, seed=2).float()
    reference, output = plain_gradients(modules, x, y)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(dp[place], "cpu")
    if is_traced:
        pipe = pipeline(nn.Sequential(*modules), (x[:2],), num_stages=num_stages)
        held = {i: pipe.get_stage_module(i) for i in indices}
        for module in held.values():
            fully_shard(module, mesh=mesh, mp_policy=policy)
        stages = [pipe.build_stage(i, "cpu", pp[replica]) for i in indices]
    else:
        held = {i: fully_shard(modules[i], mesh=mesh, mp_policy=policy) for i in indices}
        stages = [PipelineStage(held[i], i, num_stages, "cpu", group=pp[replica]) for i in indices]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=lambda o, t: mse(o.float(), t))
    rows = slice(8 * replica, 8 * replica + 8)
    found = made.step(x[rows], target=y[rows])
    if num_stages - 1 in indices:
        assert found.dtype is torch.bfloat16
        assert_close(found.float(), output[rows], "output", 2e-2)
    for i in indices:
        wanted = dict(reference[i].named_parameters())
        for name, p in held[i].named_parameters():
            grad = p.grad.full_tensor()
            assert grad.dtype is torch.float32
            inside = name.split(".", 1)[1] if is_traced else name
            assert_close(grad, wanted[inside].grad, f"stage {i} {name}", 2e-2)


@pytest.mark.parametrize("is_traced", [False, True], ids=["hand-written", "traced"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_fsdp_with_mixed_precision(schedule: str, is_traced: bool) -> None:
    run_on_ranks(4, mixed_precision, schedule, is_traced)


class Decided(nn.Module):
    """The values of a tensor decide what it computes, or how many rows it returns."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(8, 8).double(), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        if self.by == "rows":
            return h[h[:, 0] > 0]
        return h * 2 if h.sum() > 0 else h


def decided_by_values(rank: int, by: str, place_of_it: int) -> str:
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    module = Decided(by) if place == place_of_it else blocks(1)[0]
    stage = PipelineStage(wrap(module, "fsdp", dp[place]), place, 2, "cpu", group=pp[replica])
    with pytest.raises(InputError) as caught:
        Schedule1F1B([stage], 4, loss_fn=mse).step(rand(8, 8), target=rand(8, 8))
    return str(caught.value)


@pytest.mark.parametrize(("by", "place"), [("branch", 0), ("rows", 0), ("branch", 1)])
def test_a_sharded_stage_whose_values_decide_is_refused_in_our_words(by: str, place: int) -> None:
    # It was a page of torch's about unbacked symbols, and in later stages "cannot take what ...".
    for text in run_on_ranks(4, decided_by_values, by, place):
        assert f"what sharded stage {place} computes" in text
        assert (f"at {__file__}" in text) == (by == "branch")
        assert "use torch.where or a mask, or DistributedDataParallel" in text
        assert "\n" not in text


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed:
            raise KeyError("only this replica's bug")
        return torch.tanh(self.linear(x))


def part(grad: Any) -> torch.Tensor:
    """What this rank holds of a gradient."""
    held: torch.Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return held


def fault_in_one_replica(rank: int, schedule: str, wrapper: str, where: str) -> None:
    """Whatever stops one pipeline stops its replica too, at once, and both can go on."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    indices, num_stages = layout(schedule, place, 2)
    modules = blocks(num_stages)
    modules[0] = Faulty()
    x, y = rand(16, 8), rand(16, 8, seed=2)
    reference, _ = plain_gradients(modules, x, y)
    wrapped = {i: wrap(modules[i], wrapper, dp[place]) for i in indices}
    stages = [PipelineStage(wrapped[i], i, num_stages, "cpu", group=pp[replica]) for i in indices]
    made = get_schedule_class(schedule)(stages, 4, loss_fn=mse, max_unsharded=1)
    rows = slice(8 * replica, 8 * replica + 8)
    made.step(x[rows], target=y[rows])
    made.eval(x[rows])

    kept = [(p, p.grad, p.grad.clone()) for m in wrapped.values() for p in m.parameters()]

    def step(few: int) -> None:
        made.step(x[rows][:few], target=y[rows][:few])

    def evaluate(few: int) -> None:
        made.eval(x[rows][:few])

    for call in (step, step, evaluate, evaluate) if "fsdp" in wrapper else (step, step):
        start = time.monotonic()
        if where == "forward":
            modules[0].armed = replica == 1
            with pytest.raises((KeyError, RemoteStageError), match="only this replica's bug"):
                call(8)
            modules[0].armed = False
        else:  # the step is refused before it begins: more microbatches than rows
            with pytest.raises((InputError, RemoteStageError), match="4 microbatches"):
                call(3 if replica == 1 else 8)
        assert time.monotonic() - start < 10.0
        for p, grad, before in kept:
            assert p.grad is grad
            assert_close(part(grad), part(before), "the gradient before the failed step")
    made.eval(x[rows])

    for i in indices:
        wrapped[i].zero_grad()
    made.step(x[rows], target=y[rows])
    for i in indices:
        wanted = dict(reference[i].named_parameters())
        for name, p in wrapped[i].named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_close(grad, wanted[plain(name)].grad, f"stage {i} {name}")


@pytest.mark.parametrize("where", ["forward", "inputs"])
@pytest.mark.parametrize(
    ("schedule", "wrapper"),
    [
        ("1F1B", "ddp"),
        ("ZBVZeroBubble", "ddp"),
        ("Interleaved1F1B", "fsdp"),
        ("1F1B", "fsdp parts"),
    ],
)
def test_a_fault_in_one_replica_reaches_the_others(schedule: str, wrapper: str, where: str) -> None:
    # In evaluations of sharded stages replicas were not told, and lost their groups. A failed
    # forward left its stage gathered, so a later gathering was left out: replicas waited for it, or
    # took the next one for it, of which gloo's thread died. A step that was refused on one replica
    # reduced what the other had computed into its gradients, and nobody took that back.
    run_on_ranks(4, fault_in_one_replica, schedule, wrapper, where)


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("no room for what is gathered")


def second_fault(rank: int, call: str, where: str) -> None:
    """One replica fails and cannot make its collectives either: the others must not wait."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    modules: list[nn.Module] = [Faulty(), Faulty()]
    wrapped = wrap(modules[place], "fsdp", dp[place])
    stage = PipelineStage(wrapped, place, 2, "cpu", group=pp[replica])
    made = Schedule1F1B([stage], 4, loss_fn=mse, timeout=60.0)
    x = rand(8, 8)

    def break_it(*_: object) -> None:
        if modules[0].armed:
            wrapped.unshard = wrapped.reshard = no_memory

    if place == 0:
        wrapped.register_forward_pre_hook(break_it)
    made.step(x, target=x)
    made.eval(x)
    modules[0].armed = rank == 2
    few = 3 if where == "inputs" and replica == 1 else 8
    given = {"target": x[:few]} if call == "step" else {}
    if where == "inputs":
        break_it()

    start = time.monotonic()
    with pytest.raises(Exception, match=r"only this replica's bug|4 microbatches"):
        getattr(made, call)(x[:few], **given)
    assert time.monotonic() - start < 30.0
    with pytest.raises(RemoteStageError, match=r"make the groups anew|make a new schedule"):
        made.step(x, target=x)
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("where", ["forward", "inputs"])
@pytest.mark.parametrize("call", ["step", "eval"])
def test_a_replica_that_fails_twice_wakes_the_others(call: str, where: str) -> None:
    # The second failure was a note, and the others waited for the timeout.
    run_on_ranks(4, second_fault, call, where)


def gathers_and_fails(sync: FsdpSync) -> None:
    sync.ready()
    raise MemoryError("no room for what is reduced")


def refused_before_it_reduces(rank: int) -> None:
    """Replicas of one whose step is refused, and that cannot do all of its collectives either."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    module = blocks(2)[place]
    stage = PipelineStage(wrap(module, "fsdp", dp[place]), place, 2, "cpu", group=pp[replica])
    made = Schedule1F1B([stage], 4, loss_fn=mse, timeout=60.0)
    made.step(rand(8, 8), target=rand(8, 8))
    few = 3 if replica == 1 else 8
    with contextlib.ExitStack() as stack:
        if replica == 1:
            stack.enter_context(mock.patch.object(FsdpSync, "reduce", gathers_and_fails))
        stack.enter_context(pytest.raises(Exception, match="4 microbatches"))
        made.step(rand(8, 8)[:few], target=rand(8, 8)[:few])
    assert all(hasattr(p, "device_mesh") for p in module.parameters())


def test_a_step_that_is_refused_leaves_no_stage_gathered() -> None:
    # Whoever saves the parameters after an error expects the sharded ones.
    run_on_ranks(4, refused_before_it_reduces)


class LateFault(test_faults.Faulty):
    """Raises in its last backward once it is armed, and uses a second layer where told so."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8).double()
        self.uses_extra = True

    def maybe_raise(self, where: str) -> None:
        if self.armed == where:
            self.calls += 1
            if self.calls == 4:
                time.sleep(1.0)  # what others have to do they have done
                raise KeyError("only this replica's bug")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = super().forward(x)
        return h + self.extra(h) if self.uses_extra else h


def fails_at_the_end(rank: int, odd: int) -> None:
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    torch.manual_seed(0)
    module = [LateFault(), LateFault()][place]
    wrapped: Any = wrap(module, "ddp", dp[place])
    stage = PipelineStage(wrapped, place, 2, "cpu", group=pp[replica])
    made = Schedule1F1B([stage], 4, loss_fn=weighted, timeout=60.0)  # puts old gradients aside
    with wrapped.no_sync():
        made.step(rand(8, 8, seed=replica), target=rand(8, 8))
    kept = [(p, p.grad, p.grad.clone()) for p in wrapped.parameters()]
    module.uses_extra, module.armed = False, "backward" if rank == odd else ""
    with pytest.raises((KeyError, RemoteStageError), match="only this replica's bug"):
        made.step(rand(8, 8), target=rand(8, 8))
    for p, grad, before in kept:
        assert p.grad is grad
        assert torch.equal(grad, before)


@pytest.mark.parametrize("odd", [2, 3])
def test_a_step_that_fails_after_others_have_reduced_changes_no_gradient(odd: int) -> None:
    # If rank 2 fails, ranks 1 and 3 have averaged what the step without sync has left. If rank 3
    # does, rank 1 has zeros in the place of gradients that nobody has made.
    run_on_ranks(4, fails_at_the_end, odd)


class Sized(nn.Module):
    def __init__(self, has_aux: bool) -> None:
        super().__init__()
        self.has_aux = has_aux
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if self.has_aux:
            aux_loss(h.pow(2).mean(), 0.3)
        return h


def masked_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = target > 0
    return ((output - target).pow(2) * mask).sum(), mask.sum()


def weighted_and_auxiliary(rank: int, wrapper: str, has_aux: bool) -> None:
    """Replicas with other weights: the sum of all over the weight of all, as without replicas."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    modules = nn.ModuleList([Sized(has_aux), Sized(has_aux)])
    reference = copy.deepcopy(modules)
    x, y = rand(16, 8), rand(16, 8, seed=2) + 0.1
    with collect_aux_losses() as aux:
        made_by = [reference[1](reference[0](x[rows])) for rows in (slice(0, 8), slice(8, 16))]
    total, weight = masked_sum(torch.cat(made_by), y)
    (total / weight + (aux.total() / 2 if has_aux else 0.0)).backward()
    wrapped = wrap(modules[place], wrapper, dp[place])
    stage = PipelineStage(wrapped, place, 2, "cpu", group=pp[replica])
    if rank == 1:  # one replica has a hook, and must know the weight; the other runs as often
        next(wrapped.parameters()).register_hook(lambda grad: grad)
    made = Schedule1F1B(stage, 4, loss_fn=masked_sum)
    rows = slice(8 * replica, 8 * replica + 8)

    for step in (1, 2):
        made.step(x[rows], target=y[rows])
        for p, q in zip(stage.submod.parameters(), reference[place].parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_close(grad, step * q.grad, wrapper)


@pytest.mark.parametrize("has_aux", [True, False], ids=["aux", "alone"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_replicas_with_weights_of_their_own_and_auxiliary_losses(
    wrapper: str, has_aux: bool
) -> None:
    # Without auxiliary losses each replica divided the average of the sums by its own weight.
    run_on_ranks(4, weighted_and_auxiliary, wrapper, has_aux)


def do_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    made.set_result(bucket.buffer())
    return made


def refused(rank: int, case: str, words: str) -> None:
    """What fxpipe would pass over in silence is an error on all ranks, before anything runs."""
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    from torch.distributed.fsdp import FullyShardedDataParallel

    module: Any = nn.Sequential(*blocks(2)).double()
    joined: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if case == "a part":
        wrap(module[0], "fsdp", dp[place])
    elif case == "old shards":
        module = FullyShardedDataParallel(
            module, process_group=dp[place], device_id=torch.device("cpu")
        )
    elif case == "one stage" and place == 0:
        module = wrap(module, "ddp", dp[place])
    elif case != "one stage":
        is_static = case == "static graph"
        module = DistributedDataParallel(
            module, process_group=dp[place], static_graph=is_static and place == 0
        )
    made = Schedule1F1B(
        [PipelineStage(module, place, 2, "cpu", group=pp[replica])], 4, loss_fn=mse, timeout=30.0
    )
    if case == "hook":
        made.step(rand(8, 8), target=rand(8, 8))
        if place == 0:
            module.register_comm_hook(None, do_nothing)
    if case == "join":
        joined = module.join() if place == 0 else joined
    with joined, pytest.raises((InputError, RemoteStageError), match=words):
        made.step(rand(8, 8), target=rand(8, 8))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a part", "nothing averages the gradients of 4 parameters: 1.linear.weight of stage 0"),
        ("one stage", "nothing averages the gradients of 4 parameters: 0.linear.weight of stage 1"),
        ("hook", "communication hook do_nothing, which would not be called"),
        ("static graph", "static_graph=True"),
        ("join", "inside join"),
        ("old shards", "use torch.distributed.fsdp.fully_shard"),
    ],
)
def test_replicas_that_would_not_be_averaged_as_asked_are_refused(case: str, words: str) -> None:
    # Parameters in no wrapper grew apart, and communication hooks were not called, in silence.
    run_on_ranks(4, refused, case, words)


def ignored_parameters(rank: int) -> list[torch.Tensor]:
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, place = rank // 2, rank % 2
    module = blocks(2)[place]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["linear.bias"])
    stage = PipelineStage(wrap(module, "ddp", dp[place]), place, 2, "cpu", group=pp[replica])
    made = Schedule1F1B([stage], 4, loss_fn=mse)
    made.step(rand(8, 8, seed=replica), target=rand(8, 8, seed=2))
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_what_ddp_ignores_is_not_averaged() -> None:
    # It was: parameters that replicas hold different ones of, such as experts, were mixed.
    found = run_on_ranks(4, ignored_parameters)

    for one, other in (found[0::2], found[1::2]):
        assert_close(one[0], other[0], "weight")
        assert not torch.allclose(one[1], other[1])
