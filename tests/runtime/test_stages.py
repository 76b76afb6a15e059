"""Hand-written stages: whatever eager PyTorch accepts, in every schedule."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxpipe import (
    InputError,
    LocalGroup,
    Microbatches,
    PipelineStage,
    PipeliningShapeError,
    Schedule1F1B,
    ScheduleError,
)
from fxpipe.torch_inside import pytree
from tests.runtime.stages import Block, check_step, mse, rand, run_plain, schedule_for
from tests.runtime.training import SCHEDULE_NAMES, assert_close

X, Y = rand(8, 8), rand(8, 8, seed=2)
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "VHalf")


def four(kind: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(4)]


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class InPlace(Block):
    """The first operation of the stage changes what it received; it returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x.mul_(0.5)) + 0.1).view(-1, 2, 4).flatten(1)


class Shift(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        return x @ w, x * 2

    @staticmethod
    def backward(ctx, first: Tensor, second: Tensor):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        return first @ w.T + second * 2, x.T @ first


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = Square.apply(x, self.w)
        return torch.tanh(self.linear(a) + b @ self.w)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("kind", [LoRA, Custom, Twice, NoParameters])
def test_odd_stages_in_every_schedule(kind: type[nn.Module], schedule: str) -> None:
    modules = four(kind)
    if kind is NoParameters:
        modules[0] = Block()

    check_step(modules, schedule, X, Y)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_stage_may_change_its_input_in_place(schedule: str) -> None:
    # The received activation used to be a leaf, which autograd does not let be modified.
    modules = [Shift(), InPlace(), InPlace(), Block()]

    check_step(modules, schedule, X, Y)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("frozen", [[0], [1], [0, 1], [3], [1, 2]])
def test_stages_after_a_frozen_one_get_their_gradients(schedule: str, frozen: list[int]) -> None:
    modules = four(Block)
    for i in frozen:
        modules[i].requires_grad_(False)

    check_step(modules, schedule, X, Y)


def test_freezing_between_steps_is_noticed() -> None:
    modules = [Block().double() for _ in range(4)]
    made = schedule_for(modules, "ZBVZeroBubble")
    made.step(X, target=Y)
    modules[0].requires_grad_(False)
    modules[0].zero_grad()
    before = copy.deepcopy([p.grad for p in modules[3].parameters()])

    made.step(X, target=Y)

    assert all(p.grad is None for p in modules[0].parameters())
    for p, grad in zip(modules[3].parameters(), before, strict=True):
        assert_close(p.grad, 2 * grad, "accumulated")


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_checkpointing_recomputes_once_from_the_first_step(schedule: str) -> None:
    modules = four(Counted)

    check_step(modules, schedule, X, Y)

    # Four microbatches: a forward and one recomputation each; finding shapes counts nothing.
    assert [module.calls for module in modules] == [8, 8, 8, 8]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_hooks_fire_as_often_as_in_eager(schedule: str) -> None:
    modules = [Block().double() for _ in range(4)]
    counts = {"forward": 0, "value": 0, "parameter": 0}

    def count(what: str) -> None:
        counts[what] += 1

    def watch(module: nn.Module, args: tuple[Tensor]) -> None:
        count("forward")
        args[0].register_hook(lambda _: count("value"))

    modules[2].register_forward_pre_hook(watch)
    modules[2].linear.weight.register_hook(lambda _: count("parameter"))
    made = schedule_for(modules, schedule)
    for _ in range(3):
        made.step(X, target=Y)

    assert counts == {"forward": 12, "value": 12, "parameter": 12}


def test_inputs_get_their_gradients() -> None:
    x = X.clone().requires_grad_()
    plain = X.clone().requires_grad_()
    modules = four(Block)
    reference = copy.deepcopy(modules)
    for schedule in ("1F1B", "ZBVZeroBubble"):
        made = schedule_for(modules, schedule)
        x.grad = plain.grad = None

        made.step(x * 2, target=Y)  # not a leaf: the gradient flows on

        mse(run_plain([m.double() for m in reference], plain * 2), Y).backward()
        assert_close(x.grad, plain.grad, "gradient of the input")


class Pack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> object:
        h = self.linear(x)
        return {"h": [h, (h * 2, None)], "mask": x > 0, "n": 3, "name": "a"}


class Unpack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: dict) -> Tensor:  # type: ignore[type-arg]
        assert value["h"][1][1] is None
        assert value["name"] == "a"
        h = self.linear(value["h"][0] + value["h"][1][0]) * value["mask"]
        return h * value["n"]


@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1"])
def test_any_structure_between_stages(schedule: str) -> None:
    check_step([Pack(), Unpack()], schedule, X, Y)


def test_a_class_registered_without_names_for_its_parts_travels() -> None:
    class Output:
        def __init__(self, h: Tensor) -> None:
            self.h = h

    pytree.register_pytree_node(Output, lambda found: ([found.h], None), lambda h, _: Output(*h))

    class Make(Block):
        def forward(self, x: Tensor) -> object:
            return Output(super().forward(x))

    class Take(Block):
        def forward(self, value: Any) -> Tensor:
            return super().forward(value.h)

    check_step([Make(), Take()], "GPipe", X, Y)


def test_a_number_that_changes_between_microbatches_is_refused() -> None:
    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.calls += 1
            return x, self.calls

    class Take(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * n

    made = schedule_for([Counter(), Take()], loss_fn=None)
    with pytest.raises(PipeliningShapeError, match=r"output\[1\].*must be tensors"):
        made.step(X)


def test_uneven_batches_and_other_lengths() -> None:
    modules = four(Block)
    for rows, length in ((10, 3), (8, 3), (5, 7), (9, 1)):
        x, y = rand(rows, length, 8, seed=rows), rand(rows, length, 8, seed=length)
        for module in modules:
            module.zero_grad()
        check_step(modules, "ZBVZeroBubble", x, y)


def test_sum_and_weight_give_the_masked_mean() -> None:
    modules = [Block().double() for _ in range(4)]
    reference = copy.deepcopy(nn.ModuleList(modules))
    target = Y.clone()
    target[5:] = float("nan")

    def parts(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        kept = ~target.isnan()
        return (output - target)[kept].pow(2).sum(), kept.sum()

    made = schedule_for(modules, "Interleaved1F1B", loss_fn=parts)
    for step in (1, 2):  # accumulated
        made.step(X, target=target)
        total, weight = parts(run_plain(reference, X), target)
        (total / weight).backward()
        assert_close(made.loss, (total / weight).detach(), "loss")
        for p, q in zip(nn.ModuleList(modules).parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, f"gradient after step {step}")


def test_scale_grads_false_sums_over_microbatches() -> None:
    modules = [Block().double() for _ in range(2)]
    reference = copy.deepcopy(nn.ModuleList(modules))

    schedule_for(modules, scale_grads=False).step(X, target=Y)

    for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
        mse(run_plain(reference, x), y).backward()
    for p, q in zip(nn.ModuleList(modules).parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, "gradient")


def test_batchnorm_statistics_see_each_microbatch_once() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    modules = [Norm().double(), Norm().double()]
    reference = copy.deepcopy(nn.ModuleList(modules))

    schedule_for(modules).step(X, target=Y)

    for part in X.chunk(4):
        run_plain(reference, part)
    for module, plain in zip(modules, reference, strict=True):
        assert module.norm.num_batches_tracked == 4
        assert_close(module.norm.running_mean, plain.norm.running_mean, "running mean")


def test_memory_is_flat_without_the_garbage_collector() -> None:
    made = schedule_for(four(Block), "InterleavedZeroBubble")
    made.step(X, target=Y)
    gc.collect()
    gc.freeze()
    gc.disable()
    counts = []
    try:
        for _ in range(12):
            made.step(X, target=Y)
            counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    finally:
        gc.enable()
        gc.unfreeze()

    assert max(counts[4:]) <= max(counts[:4])


def test_presplit_microbatches_and_iterators() -> None:
    modules = four(Block)
    made = check_step(modules, "1F1B", X, Y)
    whole = [p.grad.clone() for module in modules for p in module.parameters()]
    parts, targets = list(X.chunk(4)), list(Y.chunk(4))
    for inputs in (parts, iter(parts)):
        for module in modules:
            module.zero_grad()
        made.step(Microbatches(inputs), target=Microbatches(targets))
        found = [p.grad for module in modules for p in module.parameters()]
        for a, b in zip(found, whole, strict=True):
            assert_close(a, b, "gradient from pre-split input")


def test_callbacks_and_replaced_actions() -> None:
    modules = [Block().double() for _ in range(2)]
    made = schedule_for(modules)
    seen = []
    made.before("F", lambda action: seen.append(f"before {action}"))
    made.after("SEND_F", lambda action: seen.append(f"after {action}"))
    made.replace("B", lambda context: (seen.append(str(context.action)), context.default()))

    made.step(X, target=Y)

    assert seen.count("before 0F0") == 1
    assert "after 0SEND_F3" in seen
    assert "1B2" in seen
    assert all(p.grad is not None for module in modules for p in module.parameters())
    with pytest.raises(ScheduleError, match="no action kind 'Q'"):
        made.before("Q", print)


def test_a_measured_timeline_has_every_action() -> None:
    made = schedule_for(four(Block), "ZBVZeroBubble")
    with pytest.raises(ScheduleError, match="record_timeline"):
        _ = made.timeline
    made.record_timeline()

    made.step(X, target=Y)

    wanted = sum(map(len, made.lowered().ranks))
    assert len(made.timeline.spans) == wanted
    assert made.timeline.makespan > 0


INF = float("inf")


@pytest.mark.parametrize("order", [2.0, 1.0, 0.5, 3.0, 0.0, -1.0, INF, -INF])
@pytest.mark.parametrize("broken", [False, True])
def test_clip_grad_norm_is_that_of_the_whole_model(order: float, broken: bool) -> None:
    modules = [Block().double() for _ in range(2)]
    made = check_step(modules, "1F1B", X, Y)
    parameters = [p for module in modules for p in module.parameters()]
    parameters[1].grad.zero_()
    if broken:
        parameters[0].grad[0, 0] = float("nan")
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, copies, strict=True):
        q.grad = p.grad.clone()

    found = made.clip_grad_norm_(0.01, order)

    expected = torch.nn.utils.clip_grad_norm_(copies, 0.01, order)
    torch.testing.assert_close(found.double(), expected.double(), equal_nan=True)
    for p, q in zip(parameters, copies, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_dw_builder_defers_what_the_module_left_undone() -> None:
    calls: list[str] = []

    def builder() -> object:
        calls.append("build")
        return lambda: calls.append("run")

    made = schedule_for(
        four(Block), "ZBVZeroBubble", stage_options=lambda i: {"dw_builder": builder}
    )
    made.step(X, target=Y)

    assert calls.count("build") == calls.count("run") == 16


def test_outputs_can_be_left_out() -> None:
    made = schedule_for(four(Block))

    assert made.step(X, target=Y, return_outputs=False) is None
    assert made.loss is not None


def test_a_user_error_keeps_its_type_and_gains_a_note() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.is_floating_point() and type(x) is Tensor:
                raise LookupError("mine")
            return x

    made = schedule_for([Block(), Bad()])
    with pytest.raises(LookupError, match="mine"):
        made.step(X, target=Y)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InputError, match="stage_index 4 is not one of the 4 stages"):
        PipelineStage(Block(), 4, 4, "cpu")
    with pytest.raises(InputError, match="n_microbatches must be a whole number"):
        schedule_for(four(Block), num_microbatches=0)
    with pytest.raises(InputError, match=r"kwargs_chunk_spec names 'maks'.*did you mean"):
        schedule_for(
            [_Masked(), Block()], kwargs_chunk_spec={"maks": None}
        ).step(X, target=Y, mask=X > 0)  # fmt: skip
    with pytest.raises(InputError, match="scalar"):
        schedule_for(four(Block), loss_fn=lambda output, target: output).step(X, target=Y)


class _Masked(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) if mask is None else super().forward(x) * mask


class WeightedLoss(nn.Module):
    """A masked sum with a parameter of its own, and one of the model's."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.shared = shared

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mask = target.detach() > 0
        error = (output * self.scale - target).pow(2) + self.shared.sum()
        return (error * mask).sum(), mask.sum()


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
def test_a_weighted_loss_scales_whatever_has_a_gradient(schedule: str) -> None:
    # The loss's own parameter and the target got the gradient of the sum, not of the mean.
    modules = [Block().double() for _ in range(3)]
    loss = WeightedLoss(modules[0].linear.weight)
    y = Y.clone().requires_grad_()
    made = schedule_for(modules, schedule, loss_fn=loss)
    leaves = [loss.scale, y, *(p for module in modules for p in module.parameters())]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)

    made.step(X, target=y)

    found = [leaf.grad for leaf in leaves]
    h = X
    for module in modules:
        h = module(h)
    total, weight = loss(h, y)
    wanted = torch.autograd.grad(total / weight, leaves)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b + 1, "gradient")


class SometimesDetached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made if x[0, 0] > 0 else made.detach()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_value_that_is_detached_in_one_microbatch_only(is_first: bool) -> None:
    """A gradient that comes back for it goes nowhere; one that would not come back is refused."""
    torch.manual_seed(0)
    modules = [SometimesDetached(), nn.Linear(4, 4).double()]
    x, y = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0]) * (-1 if is_first else 1)
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    made = Schedule1F1B(stages, 2, loss_fn=F.mse_loss)
    if is_first:
        with pytest.raises(InputError, match="requires a gradient in this microbatch, but did not"):
            made.step(x, target=y)
        return
    made.step(x, target=y)
    found = [p.grad for m in modules for p in m.parameters()]
    for m in modules:
        m.zero_grad()
    for some in (slice(0, 2), slice(2, 4)):
        (F.mse_loss(modules[1](modules[0](x[some])), y[some]) / 2).backward()
    for p, grad in zip([p for m in modules for p in m.parameters()], found, strict=True):
        torch.testing.assert_close(p.grad, grad)


class Sparse(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        if self.kind == "nested":
            return torch.nested.as_nested_tensor(list(made), layout=torch.jagged)
        return made.to_sparse()


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_that_cannot_travel_are_named(kind: str) -> None:
    modules = [Sparse(kind), nn.Linear(4, 4).double()]
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    x = torch.randn(4, 4).double()
    with pytest.raises(InputError, match=f"stage 0 returns a {kind}.*only dense tensors travel"):
        Schedule1F1B(stages, 2, loss_fn=F.mse_loss).step(x, target=x)


class TiedSparse(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, sparse=True).double()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.weight.T if self.stage else self.table(x)


def test_sparse_gradients_of_tied_parameters_are_added_up() -> None:
    """The plain model's gradient is dense: a sum of sparse and dense ones."""
    modules, plain = [TiedSparse(0), TiedSparse(1)], TiedSparse(0)
    group = LocalGroup(2)
    stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
    ids, y = torch.tensor([[0, 1], [2, 3], [1, 1], [5, 0]]), torch.randn(4, 2, 6).double()
    tied = [[(0, "table.weight"), (1, "table.weight")]]
    made = Schedule1F1B(stages, 2, loss_fn=F.mse_loss, tied=tied)
    for _ in range(2):
        made.step(ids, target=y)
        F.mse_loss(plain.table(ids) @ plain.table.weight.T, y).backward()
        for module in modules:
            torch.testing.assert_close(module.table.weight.grad, plain.table.weight.grad)
