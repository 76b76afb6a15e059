"""Traced stages under schedules: the failures that users report elsewhere, each by name."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe import (
    InputError,
    LocalGroup,
    PipeliningShapeError,
    Schedule1F1B,
    SplitPoint,
    build_stage,
    get_schedule_class,
    pipe_split,
    pipeline,
)
from tests.runtime.stages import Block, mse, rand
from tests.runtime.training import assert_close, ranks_for

X, Y = rand(8, 8), rand(8, 8, seed=2)


@dataclasses.dataclass
class Result:
    y: Tensor
    mask: Tensor
    depth: int


torch.export.register_dataclass(Result)


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def spec(*names: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(names, SplitPoint.BEGINNING)


def schedule_of(
    pipe: Any, name: str = "1F1B", loss_fn: Any = mse, n: int = 4, **options: Any
) -> Any:
    group = LocalGroup(ranks_for(name, pipe.num_stages))
    stages = [pipe.build_stage(i, torch.device("cpu"), group) for i in range(pipe.num_stages)]
    return get_schedule_class(name)(stages, 4, loss_fn=loss_fn, **options)


def check(
    model: nn.Module, pipe: Any, made: Any, x: Tensor, y: Tensor, loss_fn: Any = mse, **kwargs: Any
) -> None:
    """One step of the schedule against one pass of a copy of the model."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    model.zero_grad()
    losses: list[Tensor] = []

    output = made.step(x, target=y, losses=losses, **kwargs)

    expected = plain(x, **kwargs)
    loss = loss_fn(expected, y)
    loss.backward()
    assert_close(
        output, torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, expected), "output"
    )
    assert_close(made.loss, loss.detach(), "loss")
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    for stage in pipe.stages:
        for name, p in stage.module.named_parameters(remove_duplicate=False):
            assert_close(p.grad, wanted[name].grad, f"{name}.grad")


class Outputs(nn.Module):
    def __init__(self, build: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.build = Block(), Block(), build

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        pipe_split()
        return self.build(h, self.b(h))


@pytest.mark.parametrize(
    ("build", "pick"),
    [
        (lambda h, y: {"y": y, "h": h}, lambda o: o["y"] + 0.1 * o["h"]),
        (lambda h, y: (y, [h, None], 3), lambda o: o[0] * o[1][0]),
        (lambda h, y: Result(y, (h > 0).all(-1), 2), lambda o: o.y),
    ],
    ids=["dict", "nested", "dataclass"],
)
def test_loss_fn_gets_exactly_what_the_model_returns(build: Any, pick: Any) -> None:
    # An output made in an early stage used to be dropped, and a dict became a bare tensor.
    model = Outputs(build).double()
    pipe = pipeline(model, (X[:2],))

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return mse(pick(output), target)

    check(model, pipe, schedule_of(pipe, loss_fn=loss_fn), X, Y, loss_fn)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        pipe_split()
        g = self.b(h)
        pipe_split()
        k = self.c(g) * h
        pipe_split()
        return self.d(k) + h + g


@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
)
def test_skip_connections_over_several_stages(schedule: str) -> None:
    model = Skip().double()
    pipe = pipeline(model, (X[:2],))

    check(model, pipe, schedule_of(pipe, schedule), X, Y)


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drop, self.b = Block(), nn.Dropout(0.5), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.drop(self.a(x)), 0.5, self.training)
        pipe_split()
        return self.b(x)


def test_eval_and_train_act_on_the_stages() -> None:
    # eval() used to have no effect on what was traced in train mode.
    model = Drop().double()
    pipe = pipeline(model, (X[:2],))
    made = schedule_of(pipe)
    for stage in pipe.stages:
        stage.module.eval()
    plain = copy.deepcopy(model).eval()

    first, second = made.eval(X), made.eval(X)

    assert_close(first, plain(X).detach(), "output in eval mode")
    assert torch.equal(first, second)
    for stage in pipe.stages:
        stage.module.train()
    assert not torch.equal(made.eval(X), made.eval(X))


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.table = Block(), Block(), nn.Embedding(16, 8)

    def forward(self, x: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x + self.table(ids)) * scale


def test_a_keyword_input_first_used_in_a_later_stage() -> None:
    model = Late().double()
    ids = torch.arange(8)
    pipe = pipeline(model, (X[:2],), {"ids": ids[:2], "scale": 2.0})
    made = schedule_of(pipe)

    check(model, pipe, made, X, Y, ids=ids, scale=2.0)

    with pytest.raises(InputError, match="'ids'"):
        made.step(X, target=Y, scale=2.0)
    with pytest.raises((InputError, PipeliningShapeError), match="scale"):
        made.step(X, target=Y, ids=ids, scale=3.0)
    with pytest.raises(InputError, match="mask"):
        made.step(X, target=Y, ids=ids, scale=2.0, mask=ids)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_other_batch_sizes_and_lengths_than_traced(schedule: str) -> None:
    model = Layers().double()
    pipe = pipeline(model, (rand(2, 4, 8),), split_spec=spec("layers.1", "layers.2", "layers.3"))
    made = schedule_of(pipe, schedule)

    for rows, length in ((8, 4), (8, 6), (10, 3), (5, 1)):
        x, y = rand(rows, length, 8, seed=rows), rand(rows, length, 8, seed=length)
        check(model, pipe, made, x, y)


def test_a_shape_that_was_traced_as_static_is_refused_before_anything_is_sent() -> None:
    model = Layers().double()
    pipe = pipeline(model, (X[:2],), split_spec=spec("layers.2"))
    made = schedule_of(pipe)

    with pytest.raises(PipeliningShapeError, match=r"8.*6|6.*8"):
        made.step(rand(8, 6), target=rand(8, 6))

    check(model, pipe, made, X, Y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.middle = Block()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        pipe_split()
        h = self.middle(h)
        pipe_split()
        return self.head(h)


def test_tied_copies_on_separate_devices_get_the_whole_gradient() -> None:
    # Copied modules hold two objects, as on two ranks.
    model = Tied().double()
    plain = copy.deepcopy(model)
    ids, target = torch.arange(8), rand(8, 16)
    pipe = pipeline(model, (ids[:2],))
    group = LocalGroup(3)
    modules = [copy.deepcopy(stage.module) for stage in pipe.stages]
    stages = [build_stage(m, i, pipe.info(), "cpu", group) for i, m in enumerate(modules)]
    made = Schedule1F1B(stages, 4, loss_fn=mse)
    copies = [
        dict(modules[0].named_parameters())["embed.weight"],
        dict(modules[2].named_parameters())["head.weight"],
    ]
    assert copies[0] is not copies[1]

    for step in (1, 2):
        made.step(ids, target=target)
        mse(plain(ids), target).backward()
        for copy_ in copies:
            assert_close(copy_.grad, plain.embed.weight.grad, f"tied gradient after step {step}")
    assert torch.equal(copies[0].grad, copies[1].grad)
    norm = made.clip_grad_norm_(1e9)
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert_close(norm.double(), expected, "norm counts the tied parameter once")


def test_a_model_traced_on_meta_is_materialised_stage_by_stage() -> None:
    plain = Layers().double()
    with torch.device("meta"):
        model = Layers().double()
    pipe = pipeline(model, (X[:2],), split_spec=spec("layers.2"))
    state = plain.state_dict()
    for stage in pipe.stages:
        stage.module.to_empty(device="cpu")
        stage.module.load_state_dict({k: state[k] for k in stage.module.state_dict()}, strict=True)
    made = schedule_of(pipe)

    output = made.step(X, target=Y)

    assert_close(output, plain(X).detach(), "output")


def test_the_dtype_may_change_after_the_trace() -> None:
    model = Layers()
    pipe = pipeline(model, (X[:2].float(),), split_spec=spec("layers.1", "layers.2"))
    for stage in pipe.stages:
        stage.module.bfloat16()
    plain = copy.deepcopy(model)
    made = schedule_of(pipe)

    output = made.step(X.bfloat16(), target=Y.bfloat16())

    assert output.dtype is torch.bfloat16
    assert_close(output, plain(X.bfloat16()).detach(), "output", 1e-2)


@pytest.mark.parametrize("traced_inside", [True, False])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_autocast_around_the_step(schedule: str, traced_inside: bool) -> None:
    model = Layers()
    plain = copy.deepcopy(model)
    x, y = X.float(), Y.float()
    cuts = spec("layers.1", "layers.2", "layers.3")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output.float(), target)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=traced_inside):
        pipe = pipeline(model, (x[:2],), split_spec=cuts)
    made = schedule_of(pipe, schedule, loss_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = made.step(x, target=y)

    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(plain(part), goal) / 4
        loss.backward()
    assert output.dtype is torch.bfloat16
    wanted = dict(plain.named_parameters())
    for stage in pipe.stages:
        for name, p in stage.module.named_parameters():
            assert_close(p.grad, wanted[name].grad, f"{name}.grad", 1e-3)


def test_the_order_of_receives_changes_nothing() -> None:
    model = Skip().double()
    pipe = pipeline(model, (X[:2],))

    check(model, pipe, schedule_of(pipe, "ZBVZeroBubble", receives="late"), X, Y)
