"""What fails or differs on one rank only is told to all at once, and the next step works."""

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe import (
    FxpipeError,
    GradScaler,
    Pipeline,
    RemoteStageError,
    Schedule1F1B,
    TensorChunkSpec,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from tests.distributed.bodies import blocks, mse, plain_gradients, rand, stages_of
from tests.distributed.ranks import run_on_ranks
from tests.runtime.training import assert_close

PATIENCE = 60.0  # what a rank would wait that is told nothing
SOON = PATIENCE / 2  # at once, on a machine that may be busy

X, Y = rand(8, 8), rand(8, 8, seed=2)


class Uncopied(Tensor):
    """A buffer that cannot be copied."""

    refuses = False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if cls.refuses and function is Tensor.clone:
            raise MemoryError("no room for a copy")
        return super().__torch_function__(function, types, args, kwargs or {})


def schedule(rank: int, modules: list[nn.Module], **options: Any) -> Any:
    options.setdefault("loss_fn", mse)
    return Schedule1F1B(stages_of(modules, [rank]), 4, timeout=PATIENCE, **options)


def spec_of_no_input(rank: int, modules: list[nn.Module]) -> tuple[Any, Callable[[], object], str]:
    spec = {"nonsense": TensorChunkSpec(0)} if rank == 0 else None
    odd = schedule(rank, modules, kwargs_chunk_spec=spec)
    return odd, lambda: odd.step(X, target=Y), "nonsense"


def losses_that_is_no_list(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    return made, lambda: made.step(X, target=Y, losses=() if rank else []), "losses must be a list"


def clip_to_other_norms(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    made.step(X, target=Y)
    return (
        made,
        lambda: made.clip_grad_norm_(0.1 + rank),
        "error_if_nonfinite. must be the same on all ranks",
    )


def clip_by_no_number(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    made.step(X, target=Y)
    return made, lambda: made.clip_grad_norm_(1.0, "two" if rank else 2.0), "could not convert"


def weight_that_is_complex(rank: int, modules: list[nn.Module]) -> Any:
    def loss(output: Tensor, target: Tensor) -> Any:
        return mse(output, target), torch.tensor(1 + 2j)

    made = schedule(rank, modules, loss_fn=loss)
    return schedule(rank, modules), lambda: made.step(X, target=Y), "not a real number"


def buffer_that_cannot_be_copied(rank: int, modules: list[nn.Module]) -> Any:
    if rank:
        modules[1].register_buffer("odd", torch.zeros(3).as_subclass(Uncopied))
    made = schedule(rank, modules)

    def step() -> None:
        Uncopied.refuses = True
        try:
            made.step(X, target=Y)
        finally:
            Uncopied.refuses = False

    return made, step, "no room for a copy"


def tied_copy_on_meta(rank: int, modules: list[nn.Module]) -> Any:
    whole = schedule(rank, modules)
    odd = blocks(2)
    if rank:
        odd[1].to("meta")
    made = schedule(rank, odd, tied=TIED)
    return whole, lambda: made.step(X, target=Y), "is_meta"


def call_within_a_call(rank: int, modules: list[nn.Module]) -> Any:
    inner = schedule(rank, modules)
    waiting = [inner]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if waiting:
            waiting.pop().eval(X)
        return mse(output, target)

    made = schedule(rank, modules, loss_fn=loss)
    return inner, lambda: made.step(X, target=Y), "of another schedule of the same process group"


def tied_copy_changed_on_one_rank(rank: int, modules: list[nn.Module]) -> Any:
    odd = blocks(2)
    made = schedule(rank, odd, tied=[[(0, "linear.weight"), (1, "linear.weight")]])
    made.step(X, target=Y)
    if rank:
        odd[1].load_state_dict({k: v + 1 for k, v in odd[1].state_dict().items()})
    return schedule(rank, modules), lambda: made.step(X, target=Y), "have different values"


def module_that_is_none(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    made.step(X, target=Y)

    def step() -> None:
        if not rank:
            made.stages[0].submod = None
        try:
            made.step(X, target=Y)
        finally:
            made.stages[0].submod = modules[rank]

    return made, step, "must be a torch.nn.Module, got NoneType"


def gradient_that_does_not_fit(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    made.step(X, target=Y)
    weight = next(modules[rank].parameters())
    before = weight.data

    def step() -> None:
        if rank:
            weight.data = before.to(torch.float16)
        try:
            made.step(X, target=Y)
        finally:
            weight.data = before

    return made, step, "dtype"


TIED = [[(0, "linear.weight"), (1, "linear.weight")]]


def tied_copy_assigned_on_one_rank(rank: int, modules: list[nn.Module]) -> Any:
    odd = blocks(2)
    made = schedule(rank, odd, tied=TIED)
    made.step(X, target=Y)
    if rank:  # the owner's values would take the place of what was loaded
        state = {name: torch.full_like(v, 7.0) for name, v in odd[1].state_dict().items()}
        odd[1].load_state_dict(state, assign=True)
    return schedule(rank, modules), lambda: made.step(X, target=Y), "have different values"


def tied_copy_changed_without_a_version(rank: int, modules: list[nn.Module]) -> Any:
    odd = blocks(2)
    made = schedule(rank, odd, tied=TIED)
    made.step(X, target=Y)
    if rank:
        odd[1].linear.weight.data.add_(1.0)
    return schedule(rank, modules), lambda: made.step(X, target=Y), "have different values"


def tied_copy_with_another_learning_rate(rank: int, modules: list[nn.Module]) -> Any:
    odd = blocks(2)
    made = schedule(rank, odd, tied=TIED)
    made.step(X, target=Y)
    torch.optim.SGD(odd[rank].parameters(), 0.1 * (rank + 1)).step()
    return schedule(rank, modules), lambda: made.step(X, target=Y), "learning rate"


def gradients_scaled_on_one_rank(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)

    def step() -> None:
        made.grad_scale = 4.0 if rank else 1.0
        try:
            made.step(X, target=Y)
        finally:
            made.grad_scale = 1.0

    return (
        made,
        step,
        "grad_scale must be the same on all ranks, but got 1.0 on rank 0, 4.0 on rank 1",
    )


def loss_everywhere_but_at_the_last_stage(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, blocks(2), loss_fn=None if rank else mse)
    return schedule(rank, modules), lambda: made.step(X, target=Y), "has no loss_fn, but rank 0 has"


def new_schedules_in_another_order(rank: int, modules: list[nn.Module]) -> Any:
    pair = [schedule(rank, modules), schedule(rank, blocks(2))]
    words = "rank 0 calls step.. of its new schedule 1, rank 1 calls step.. of its new schedule 2"
    return pair[0], lambda: pair[rank].step(X, target=Y), words


def weight_that_has_a_gradient(rank: int, modules: list[nn.Module]) -> Any:
    def loss(output: Tensor, target: Tensor) -> Any:
        return mse(output, target), output.abs().sum()

    made = schedule(rank, modules, loss_fn=loss)
    return schedule(rank, modules), lambda: made.step(X, target=Y), "only the sum is differentiated"


def losses_of_two_kinds(rank: int, modules: list[nn.Module]) -> Any:
    count = iter(range(100))

    def loss(output: Tensor, target: Tensor) -> Any:
        return mse(output, target) if next(count) % 2 else (mse(output, target), 1.0)

    made = schedule(rank, modules, loss_fn=loss)
    return schedule(rank, modules), lambda: made.step(X, target=Y), "return one kind"


def unequal_numbers_of_batches(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    batches = [(X, Y)] * (2 + rank)
    words = "the number of batches must be the same on all ranks, but got 2 on rank 0, 3 on rank 1"
    return made, lambda: Pipeline(made).accumulate(batches), words


def batches_that_cannot_be_read(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield X, Y
        if rank:
            raise OSError("the disk is gone")

    return made, lambda: Pipeline(made).accumulate(batches()), "the disk is gone"


def checkpoint_of_another_step(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    words = "step must be the same on all ranks, but got 1 on rank 0, 2 on rank 1"
    return made, lambda: save_checkpoint("never", made, step=1 + rank), words


def unscale_beside_another_call(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)
    made.step(X, target=Y)
    optimizer = torch.optim.SGD(modules[rank].parameters(), 0.1)
    scaler = GradScaler(made, "cpu", init_scale=4.0)
    made.grad_scale = 1.0

    def call() -> None:
        if rank:
            scaler.unscale_(optimizer)
        made.clip_grad_norm_(1.0)

    return made, call, "rank 0 calls clip_grad_norm_.*rank 1 calls scaler"


def nothing_that_wants_a_gradient(rank: int, modules: list[nn.Module]) -> Any:
    made = schedule(rank, modules)

    def call() -> None:
        modules[rank].requires_grad_(False)
        try:
            made.step(X, target=Y)
        finally:
            modules[rank].requires_grad_(True)

    return made, call, "does not depend on anything that requires a gradient"


def loss_of_all_parameters(rank: int, modules: list[nn.Module]) -> Any:
    model = nn.Sequential(*blocks(2))
    pipe = pipeline(model, (X[:2],), num_stages=2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) + sum(p.pow(2).sum() for p in model.parameters())

    stage = pipe.build_stage(rank, torch.device("cpu"))
    made = Schedule1F1B(stage, 4, loss_fn=loss, timeout=PATIENCE)
    words = "loss_fn uses '.*' of stage 0, which another rank trains"
    return schedule(rank, modules), lambda: made.step(X, target=Y), words


CAUSES = [
    loss_of_all_parameters,
    checkpoint_of_another_step,
    unscale_beside_another_call,
    nothing_that_wants_a_gradient,
    tied_copy_assigned_on_one_rank,
    tied_copy_changed_without_a_version,
    tied_copy_with_another_learning_rate,
    gradients_scaled_on_one_rank,
    loss_everywhere_but_at_the_last_stage,
    new_schedules_in_another_order,
    weight_that_has_a_gradient,
    losses_of_two_kinds,
    unequal_numbers_of_batches,
    batches_that_cannot_be_read,
    tied_copy_changed_on_one_rank,
    module_that_is_none,
    gradient_that_does_not_fit,
    spec_of_no_input,
    losses_that_is_no_list,
    clip_to_other_norms,
    clip_by_no_number,
    weight_that_is_complex,
    buffer_that_cannot_be_copied,
    tied_copy_on_meta,
    call_within_a_call,
]


def differ(rank: int, name: str) -> None:
    cause = next(one for one in CAUSES if one.__name__ == name)
    modules = blocks(2)
    made, call, words = cause(rank, modules)
    before = [None if p.grad is None else p.grad.clone() for p in modules[rank].parameters()]

    begin = time.monotonic()
    with pytest.raises(BaseException, match=words):
        call()

    assert time.monotonic() - begin < SOON
    for p, grad in zip(modules[rank].parameters(), before, strict=True):
        assert_close(p.grad, grad, "after the failure")
    if cause is not spec_of_no_input:
        modules[rank].zero_grad()
        made.step(X, target=Y)
        reference, _ = plain_gradients(blocks(2), X, Y)
        for p, q in zip(modules[rank].parameters(), reference[rank].parameters(), strict=True):
            assert_close(p.grad, q.grad, "the step after")


@pytest.mark.parametrize("name", [cause.__name__ for cause in CAUSES])
def test_all_ranks_raise_at_once_and_go_on(name: str) -> None:
    run_on_ranks(2, differ, name)


def interrupted_between_two_exchanges(rank: int) -> None:
    modules = blocks(2)
    made = schedule(rank, modules)
    made.step(X, target=Y)

    begin = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt if rank else RemoteStageError) as caught,
        made._session.call("eval") as control,
    ):
        control.exchange([])
        if rank:
            raise KeyboardInterrupt
        control.exchange([])

    assert time.monotonic() - begin < SOON
    assert rank or "KeyboardInterrupt" in str(caught.value)
    with pytest.raises(FxpipeError):
        made.step(X, target=Y)


def test_an_interrupt_while_agreeing_breaks_the_schedule_on_all_ranks() -> None:
    # Between two exchanges nobody is told: the other ranks waited out their timeout.
    run_on_ranks(2, interrupted_between_two_exchanges)


class RingError(Exception):
    """Raised by a signal."""


def ring(*_: object) -> None:
    raise RingError("it rings")


def interrupted_while_meeting(rank: int) -> None:
    # The word that rank 0 had left in the store made rank 1 wait for it as long as it could.
    made = schedule(rank, blocks(2))
    usual = signal.signal(signal.SIGALRM, ring)
    if rank:
        time.sleep(1.0)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    begin = time.monotonic()
    with pytest.raises(RemoteStageError if rank else RingError, match="it rings"):
        made.step(X, target=Y)

    assert time.monotonic() - begin < SOON
    signal.signal(signal.SIGALRM, usual)
    made.step(X, target=Y)


def test_an_interrupt_while_meeting_reaches_all_ranks() -> None:
    run_on_ranks(2, interrupted_while_meeting)


def load_without_a_stage(rank: int, folder: str) -> int:
    # Ranks without a stage used to load by themselves, while the others waited for them.
    group = dist.new_group([0, 1])
    stages = stages_of(blocks(2), [rank], group) if rank < 2 else []
    save_checkpoint(folder, stages, step=7)
    return load_checkpoint(folder, stages).step


def test_ranks_without_a_stage_load_with_the_others(tmp_path: Path) -> None:
    assert run_on_ranks(3, load_without_a_stage, str(tmp_path)) == [7, 7, 7]


def stop_who_holds_the_store(rank: int) -> None:
    modules = blocks(2)
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=mse, timeout=3.0)
    made.step(X, target=Y)
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, 0)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RemoteStageError, match="rank 0: TimeoutError: no answer from rank 0"):
        made.step(X, target=Y)

    if rank:  # had this rank waited for the store, both would stand still
        os.kill(int(pid), signal.SIGCONT)


def test_a_stopped_store_stops_nobody_else() -> None:
    # Who asked the store waited in C for the stopped process, whatever the timeout.
    run_on_ranks(2, stop_who_holds_the_store, holds_store=True)


def without_descriptors(rank: int) -> None:
    made = schedule(rank, blocks(2))
    held = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))

    begin = time.monotonic()
    with pytest.raises(RemoteStageError, match=r"rank 1: OSError: .*Too many open files"):
        made.step(X, target=Y)

    assert time.monotonic() - begin < SOON
    for one in held:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    made.step(X, target=Y)


def test_too_few_descriptors_on_one_rank_are_named_on_all() -> None:
    run_on_ranks(2, without_descriptors)


class Slow(nn.Module):
    is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.15)
        if self.is_bad:
            raise ValueError("bad batch")
        return x


def learn_of_a_failure_late(rank: int) -> None:
    slow = Slow()
    made = schedule(rank, [nn.Sequential(module, slow) for module in blocks(2)])
    made.step(X, target=Y)
    store = made._session._control.board.store
    get = store.get

    def late(key: str) -> bytes:
        found: bytes = get(key)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.4)
        return found

    store.get = late
    slow.is_bad = rank == 1
    with pytest.raises(BaseException, match="bad batch"):
        made.step(X, target=Y)
    slow.is_bad = False

    made.step(X, target=Y)


def test_a_failure_that_all_got_over_does_not_come_back() -> None:
    # The watching thread had asked the store, and noted the answer in the next step.
    run_on_ranks(2, learn_of_a_failure_late)


def give_up_alone(rank: int) -> None:
    """Rank 0 cannot get over a call that succeeded on rank 1; a new schedule must meet anew."""
    modules = blocks(2)
    made = schedule(rank, modules)
    made.step(X, target=Y)
    with contextlib.suppress(KeyboardInterrupt), made._session.call("eval") as control:
        control.exchange([])
        if rank == 0:
            raise KeyboardInterrupt
    dist.barrier()
    modules[rank].zero_grad()

    schedule(rank, modules).step(X, target=Y)

    with pytest.raises(RemoteStageError, match="rank 0: KeyboardInterrupt"):
        made.step(X, target=Y)


def test_a_new_schedule_meets_anew_on_all_ranks() -> None:
    # Rank 1 did not know yet that rank 0 had given up, and rank 0 waited for it.
    run_on_ranks(2, give_up_alone)


class Turned(nn.Module):
    """Complex numbers whose sign of the imaginary part is a flag, forwards and backwards."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(8, 8, seed=place).to(torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.conj()).conj()


def conjugated(rank: int, rows: int) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse(torch.view_as_real(output.resolve_conj()), target)

    modules = [Turned(0), Turned(1)]
    x, y = rand(4 * rows, 8).to(torch.complex128) * (1 + 2j), rand(4 * rows, 8, 2, seed=2)
    made = Schedule1F1B(stages_of(modules, [rank]), 4, loss_fn=loss, timeout=PATIENCE)
    made.step(x, target=y)
    found = modules[rank].weight.grad
    plain = [Turned(0), Turned(1)]
    loss(plain[1](plain[0](x)), y).backward()
    torch.testing.assert_close(found, plain[rank].weight.grad)


@pytest.mark.parametrize("rows", [2, 20_000])  # over a socket, and by gloo
def test_numbers_that_are_conjugated_by_a_flag_travel(rows: int) -> None:
    run_on_ranks(2, conjugated, rows)
