"""A step happens as a whole or not at all, in one process, whatever stops it."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe import (
    InputError,
    LocalGroup,
    Microbatches,
    PipelineStage,
    Schedule1F1B,
    ScheduleError,
    ScheduleFromProgram,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBH1,
    get_schedule_class,
)
from fxpipe.program import Kind
from fxpipe.program.generators import forward_only_on, get_schedule

X, Y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Part(), Part()]


def schedule_of(modules: list[nn.Module], cls: Any = Schedule1F1B, **options: Any) -> Any:
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    return cls(stages, 4, loss_fn=options.pop("loss_fn", F.mse_loss), **options)


def state_of(modules: list[nn.Module]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for module in modules:
        found += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        found += [b.clone() for b in module.buffers()]
    return found


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all((u is None and v is None) or torch.equal(u, v) for u, v in zip(a, b, strict=True))


class UnspeakableError(Exception):
    """Has no text, and takes no notes."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


def in_forward(modules: list[nn.Module], made: Any, error: BaseException) -> Callable[[], None]:
    seen: list[int] = []

    def hook(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise error

    return modules[1].register_forward_hook(hook).remove


def in_backward(modules: list[nn.Module], made: Any, error: BaseException) -> Callable[[], None]:
    def hook(*_: Any) -> None:
        raise error

    return modules[0].linear.weight.register_hook(hook).remove


def pair_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).pow(2).sum(), output.numel()


@pytest.mark.parametrize("loss", [F.mse_loss, pair_loss])
@pytest.mark.parametrize("cls", [ScheduleGPipe, Schedule1F1B, ScheduleZBH1])
@pytest.mark.parametrize("where", [in_forward, in_backward])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, UnspeakableError])
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_failed_step_changes_nothing_and_the_next_one_runs(loss, cls, where, kind, earlier):
    modules = parts()
    made = schedule_of(modules, cls, loss_fn=loss)
    twin = copy.deepcopy(modules)
    reference = schedule_of(twin, cls, loss_fn=loss)
    for _ in range(earlier):
        made.step(X, target=Y)
        reference.step(X, target=Y)
    before = state_of(modules)
    remove = where(modules, made, kind("bad batch"))

    with pytest.raises(kind):
        made.step(X, target=Y)

    assert same(before, state_of(modules))
    remove()
    made.step(X, target=Y)
    reference.step(X, target=Y)
    assert same(state_of(twin), state_of(modules))


def test_outputs_that_cannot_be_merged_take_the_step_back():
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    made = schedule_of(modules)
    uneven = Microbatches([torch.randn(2, n, 4) for n in (1, 2, 3, 4)])

    with pytest.raises(InputError, match="cannot merge"):
        made.step(uneven, target=uneven)

    assert all(p.grad is None for m in modules for p in m.parameters())


def test_an_iterator_that_ends_early_is_an_error_of_the_inputs():
    def two() -> Iterator[Tensor]:
        yield X[:2]
        yield X[2:4]

    made = schedule_of(parts())

    with pytest.raises(InputError):
        made.step(Microbatches(two()), target=Y)
    made.step(X, target=Y)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * self.weight * scale


@pytest.mark.parametrize("values", [(-1.0, -2.0), (0.0, -0.0), (1, True), (float("nan"), 2.0)])
def test_values_that_look_alike_are_told_apart(values):
    # Plans used to be found by a hash, and hash(-1.0) == hash(-2.0).
    made = schedule_of([Scaled(), nn.Identity()])

    for value in (*values, *values):
        out = made.eval(X, scale=value)
        assert torch.equal(torch.nan_to_num(out), torch.nan_to_num(X * value))


def replace_parameters(modules: list[nn.Module], made: Any) -> None:
    state = {name: value + 1 for name, value in modules[0].state_dict().items()}
    modules[0].load_state_dict(state, assign=True)


def replace_module(modules: list[nn.Module], made: Any) -> None:
    modules[0] = made.stages[0].submod = Part()


def change_shape(modules: list[nn.Module], made: Any) -> None:
    modules[0].linear = nn.Linear(4, 6).double()
    modules[0].norm = nn.BatchNorm1d(6).double()
    modules[1].linear = nn.Linear(6, 4).double()


def add_hook(modules: list[nn.Module], made: Any) -> None:
    modules[0].register_forward_hook(lambda module, args, output: output * 2)


def freeze(modules: list[nn.Module], made: Any) -> None:
    modules[0].requires_grad_(False)


def evaluate(modules: list[nn.Module], made: Any) -> None:
    for module in modules:
        module.eval()


@pytest.mark.parametrize(
    "change", [replace_parameters, replace_module, change_shape, add_hook, freeze, evaluate]
)
def test_what_is_remembered_of_modules_is_compared_at_every_step(change):
    modules = parts()
    made = schedule_of(modules)
    made.step(X, target=Y)
    change(modules, made)
    for module in modules:
        module.zero_grad()
    twin = copy.deepcopy(modules)

    made.step(X, target=Y)

    for x, y in zip(X.split(2), Y.split(2), strict=True):
        (F.mse_loss(twin[1](twin[0](x)), y) / 4).backward()
    for module, plain in zip(modules, twin, strict=True):
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert torch.allclose(p.grad, q.grad)


def test_a_call_inside_a_call_is_refused():
    modules = parts()
    made = schedule_of(modules)
    remove = modules[0].register_forward_hook(lambda *_: made.eval(X) and None).remove

    with pytest.raises(InputError, match="another call of the same schedule is not over"):
        made.step(X, target=Y)
    remove()
    made.step(X, target=Y)


def test_a_program_without_backwards_and_a_loss_are_refused():
    placement = get_schedule("1F1B").placement(2, 2)
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(parts())]
    made = ScheduleFromProgram(stages, forward_only_on(placement, 4), loss_fn=F.mse_loss)

    with pytest.raises(ScheduleError, match="forwards only"):
        made.step(X, target=Y)
    assert made.eval(X).shape == X.shape


@pytest.mark.parametrize("kind", ["SEND_F", "RECV_B", "F", "B"])
def test_a_replaced_action_must_happen(kind):
    # A backward that a function left out was missing in the gradients, and nobody said so.
    made = schedule_of(parts())
    made.replace(kind, lambda context: None)

    with pytest.raises(InputError, match=r"did not call context.default\(\)"):
        made.step(X, target=Y)


def test_an_error_on_a_thread_of_the_users_is_raised(monkeypatch):
    # torchtitan runs backwards on a thread; what was raised there was printed and forgotten.
    modules = parts()
    made = schedule_of(modules)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fails(grad: Tensor) -> None:
        raise ArithmeticError("no gradient today")

    def on_a_thread(context: Any) -> None:
        thread = threading.Thread(target=context.default)
        thread.start()
        thread.join()

    made.replace("B", on_a_thread)
    made.step(X, target=Y)
    next(modules[0].parameters()).register_hook(fails)

    with pytest.raises(ArithmeticError, match="no gradient today"):
        made.step(X, target=Y)


class Buffered(nn.Module):
    """Returns the same buffer for every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.out = torch.zeros(2, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out.copy_(self.linear(x))


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_may_return_the_same_buffer_each_time_in_eval(place):
    modules: list[nn.Module] = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    modules[place] = Buffered()
    with torch.no_grad():
        wanted = torch.cat([modules[1](modules[0](x)).clone() for x in X.split(2)])

    assert torch.equal(schedule_of(modules, ScheduleGPipe).eval(X), wanted)


class Counted(nn.Module):
    """Counts its calls in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(x)


def test_a_replaced_buffer_is_put_back() -> None:
    # The old tensor was restored, which the module no longer held.
    modules: list[nn.Module] = [Counted(), Counted()]
    made = schedule_of(modules)
    made.step(X, target=Y)
    in_forward(modules, made, ValueError("bad batch"))

    with pytest.raises(ValueError, match="bad batch"):
        made.step(X, target=Y)

    assert [float(module.count) for module in modules] == [4.0, 4.0]


@pytest.mark.parametrize("is_view", [False, True])
def test_a_frozen_stage_may_return_the_same_buffer_each_time(is_view: bool) -> None:
    # Each microbatch overwrote the last one's values before they were read: silently, if the
    # buffer came as a new view.
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double().requires_grad_(False)
            self.out = torch.zeros(2, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            self.out.copy_(self.linear(x))
            return self.out[:] if is_view else self.out

    modules: list[nn.Module] = [Buffered(), nn.Linear(4, 4).double()]
    made = schedule_of(modules, ScheduleGPipe)
    plain = copy.deepcopy(modules)

    made.step(X, target=Y)

    F.mse_loss(plain[1](plain[0].linear(X)), Y).backward()
    torch.testing.assert_close(modules[1].weight.grad, plain[1].weight.grad)


class WeightedLoss(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).pow(2) * self.scale).mean()


def test_gradients_of_the_loss_and_the_target_are_put_back() -> None:
    # Only the stages' own parameters were.
    modules = parts()
    loss, target = WeightedLoss(), Y.clone().requires_grad_()
    made = schedule_of(modules, loss_fn=loss)
    made.step(X, target=target)
    before = [loss.scale.grad.clone(), target.grad.clone()]
    remove = in_forward(modules, made, ValueError("bad batch"))

    with pytest.raises(ValueError, match="bad batch"):
        made.step(X, target=target)

    assert same([loss.scale.grad, target.grad], before)
    remove()
    made.step(X, target=target)
    torch.testing.assert_close(loss.scale.grad, 2 * before[0])


class CountingLoss(nn.Module):
    """Counts its calls in a buffer, and fails at one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        if self.count == 6:
            raise ValueError("bad target")
        return F.mse_loss(output, target)


def test_the_buffers_of_a_loss_are_put_back() -> None:
    loss = CountingLoss()
    made = schedule_of(parts(), loss_fn=loss)
    made.step(X, target=Y)

    with pytest.raises(ValueError, match="bad target"):
        made.step(X, target=Y)

    assert float(loss.count) == 4.0


def test_tied_copies_of_one_rank_are_compared_too() -> None:
    modules = parts()
    tied = [[(0, "linear.weight"), (1, "linear.weight")]]
    modules[1].linear.weight.requires_grad_(False)
    stages = [PipelineStage(m, i, 2, "cpu", group=LocalGroup(1)) for i, m in enumerate(modules)]
    made = ScheduleInterleaved1F1B(stages, 4, loss_fn=F.mse_loss, tied=tied)

    with pytest.raises(InputError, match="True on rank 0, False on rank 0"):
        made.step(X, target=Y)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_a_timeout_is_a_positive_number(timeout: Any) -> None:
    with pytest.raises(InputError, match="timeout must be a positive number of seconds"):
        schedule_of(parts(), timeout=timeout)


def test_a_complex_loss_is_refused_and_the_next_step_works() -> None:
    modules = parts()
    kinds = [torch.complex128, torch.float64]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target).to(kinds[0])

    made = schedule_of(modules, loss_fn=loss)
    before = state_of(modules)
    with pytest.raises(InputError, match=r"must return a real number, but returned torch.complex"):
        made.step(X, target=Y)
    assert same(state_of(modules), before)

    kinds.pop(0)
    made.step(X, target=Y)
    assert all(p.grad is not None for module in modules for p in module.parameters())


def test_the_failing_part_of_a_pair_is_named() -> None:
    """The action is a forward beside a backward; only the backward of stage 3 fails."""
    modules = [nn.Linear(4, 4).double() for _ in range(4)]
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 4, "cpu", group=group) for i, m in enumerate(modules)]
    made = get_schedule_class("DualPipeV")(stages, 4, loss_fn=F.mse_loss)
    pairs = [a for actions in made.program.ranks for a in actions if a.parts]
    failing = next(part for pair in pairs for part in pair.parts if part.kind is not Kind.FORWARD)
    seen = []

    def fail(grad: Tensor) -> None:
        seen.append(grad)
        if len(seen) == failing.microbatch + 1:
            raise ValueError("not this one")

    modules[failing.stage].bias.register_hook(fail)
    with pytest.raises(ValueError, match="not this one") as caught:
        made.step(X, target=Y)
    assert f"action {failing}" in "".join(caught.value.__notes__)


def test_parameters_that_a_failed_step_has_changed_are_named() -> None:
    modules = parts()
    made = schedule_of(modules)
    optimizer = torch.optim.SGD(modules[1].parameters(), 0.1)

    def update(_: Tensor) -> None:
        optimizer.step()
        raise OSError("and then this")

    modules[1].linear.bias.register_post_accumulate_grad_hook(update)
    with pytest.raises(OSError, match="and then this") as caught:
        made.step(X, target=Y)
    assert "has changed stage 1.linear.bias and 2 more" in "".join(caught.value.__notes__)
