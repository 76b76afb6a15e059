"""A pipe that does not do what its model does is found out, and nothing else is."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe import SplitPoint, TraceError, pipe_split, pipeline
from fxpipe.errors import InputError
from fxpipe.graph.check.check import Budget
from fxpipe.graph.pipe import Pipe, check_pipe

X = torch.randn(4, 6, 8)
BUDGET = Budget(60.0, 1e9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = torch.relu(self.a(x))
        pipe_split()
        return self.b(F.dropout(x, 0.5, self.training))


def report_of(pipe: Pipe, model: nn.Module, *args: Any) -> Any:
    return check_pipe(pipe, model, args, {}, budget=BUDGET)


def tampered(model: nn.Module, change: Callable[[fx.Node], None], name: str) -> Pipe:
    """A pipe in which the node of that name was changed."""
    pipe = pipeline(model, (X,), check=False)  # it is checked after the change
    for stage in pipe.stages:
        for node in list(stage.module.graph.nodes):
            if node.name.startswith(name) and node.op.startswith("call"):
                change(node)
        stage.module.recompile()
    return pipe


def test_a_pipe_says_what_was_compared() -> None:
    pipe = pipeline(Net(), (X,))

    assert pipe.info().check.lines() == [
        "equal to the plain model: the example; with gradients; batch 5, sequence 13, other "
        "values; batch 1, sequence 3, eval(); a second call, batch 1, sequence 3"
    ]
    assert str(pipe).endswith(str(pipe.info().check))
    assert pipe.info().check.seconds > 0
    assert pipeline(Net(), (X,), check=False).info().check.lines() == []


def test_a_value_of_the_same_function_is_found_at_its_line() -> None:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.mul(self.a(x), 3.0)
            pipe_split()
            return self.b(x)

    def change(node: fx.Node) -> None:
        node.args = (*node.args[:-1], 2.0)

    model = Scaled()

    with pytest.raises(TraceError, match=r"'mul' of stage 0, made at\n.*torch\.mul\(self\.a\(x\)"):
        report_of(tampered(model, change, "mul"), model, X)


def _drop(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _again(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        node.graph.call_function(torch.rand, (1,))


def _detach(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        made = node.graph.call_method("detach", (node,))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _twice(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)


@pytest.mark.parametrize(
    ("change", "node", "message"),
    [
        (_drop, "dropout", "output differs"),
        (_again, "b", "random state of torch: the stages do not draw the same"),
        (_detach, "relu", "gradient of a.weight"),
        (_twice, "add_", "state count"),
    ],
)
def test_every_kind_of_difference_is_seen(change: Any, node: str, message: str) -> None:
    model = Net()

    with pytest.raises(TraceError, match=message):
        report_of(tampered(model, change, node), model, X)


def test_the_calls_of_attention_kernels_are_compared() -> None:
    class Attends(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)[:, :6]
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            pipe_split()
            return self.b(x)

    def dense(node: fx.Node) -> None:
        with node.graph.inserting_before(node):
            length = node.graph.call_method("size", (node.args[0], 1))
            size = ((length, length),)
            ones = node.graph.call_function(torch.ones, size, {"dtype": torch.bool})
            mask = node.graph.call_method("tril", (ones,))
        node.kwargs = {"attn_mask": mask}

    model = Attends()

    assert report_of(pipeline(model, (X,)), model, X).is_checked
    pipe = tampered(model, dense, "scaled_dot_product_attention")
    with pytest.raises(TraceError, match=r"calls of attention kernels: \(is_causal=True"):
        check_pipe(pipe, model, (X,), {}, budget=BUDGET)


def test_the_model_is_left_as_it_was() -> None:
    model = Net()
    model.a.weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    x = X.clone().requires_grad_()

    pipeline(model, (x,))

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.a.weight.grad, torch.ones(8, 8))
    assert model.b.weight.grad is None
    assert x.grad is None
    assert model.training


def test_a_model_that_differs_from_itself_is_not_blamed() -> None:
    counter = itertools.count()

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + next(counter)

    pipe = pipeline(nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 8)), (X,), num_stages=2)

    assert "the plain model differs from run to run: output" in str(pipe.info().check)
    assert not pipe.info().check.is_checked


def test_an_attribute_that_split_code_sets_is_set_by_the_stages_too() -> None:
    class Remembers(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            self.aux = x.mean()
            return self.b(x)

    model = Remembers()
    pipe = pipeline(model, (X,))
    assert not hasattr(model, "aux")
    model(X)
    expected = model.aux
    pipe(X + 1)
    assert not torch.equal(model.aux, expected)
    pipe(X)

    assert torch.equal(model.aux, expected)


@dataclass
class Out:
    scores: Tensor
    best: Tensor
    flags: Tensor
    name: str


def test_outputs_of_any_kind_are_compared() -> None:
    class Many(Net):
        def forward(self, x: Tensor) -> Out:
            x = self.a(x)
            pipe_split()
            y = self.b(x)
            return Out(y.log(), y.argmax(-1), y > 0, "many")  # logarithms of negative numbers

    pipe = pipeline(Many(), (X,))

    assert len(pipe.info().check.equal) == 5


def test_where_the_plain_model_fails_the_pipe_must_fail() -> None:
    class Four(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            if x.shape[0] not in (1, 4):
                raise ValueError("one or four rows")
            return self.b(x)

    report = pipeline(Four(), (X,)).info().check

    assert report.is_checked
    assert not any("batch 5" in name for name in report.equal)


def test_a_model_without_data_is_checked_by_a_small_one() -> None:
    def build(width: int, layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    with torch.device("meta"):
        large = build(64, 8)
    example = torch.randn(2, 64, device="meta")
    small = (build(4, 2), (torch.randn(3, 4),))

    report = pipeline(large, (example,), num_stages=2, check_with=small).info().check
    unchecked = pipeline(large, (example,), num_stages=2).info().check

    assert report.equal[0] == "the example (of the small model)"
    assert "tensors without data" in unchecked.left_out[0]
    with pytest.raises(TraceError, match="check=True, but not checked: tensors without data"):
        pipeline(large, (example,), num_stages=2, check=True)


def test_a_small_model_that_decides_otherwise_is_refused() -> None:
    class Doubles(Net):
        def __init__(self, doubles: bool) -> None:
            super().__init__()
            self.doubles = doubles

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            return self.b(x * 2 if self.doubles else x)

    with pytest.raises(TraceError, match=r"only the model itself: mul\(\) at .*test_check\.py"):
        pipeline(Doubles(True), (X,), check_with=(Doubles(False), (X,)))
    with pytest.raises(InputError, match="check_with must be"):
        pipeline(Doubles(True), (X,), check_with=(X,))


def test_a_budget_leaves_runs_out_and_says_so() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    few = pipeline(model, (X,), num_stages=2, check=Budget(1e-9, 1e9)).info().check
    none = pipeline(model, (X,), num_stages=2, check=Budget(2.0, 100.0)).info().check

    assert not few.equal
    assert all("the budget of 1e-09 s" in text for text in few.left_out)
    assert "GB beside the model, the budget is" in none.left_out[0]
    for wrong in ("never", 3, None):
        with pytest.raises(InputError, match="check must be"):
            pipeline(model, (X,), num_stages=2, check=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="positive"):
        Budget(0.0)


def test_a_split_spec_works_with_a_check_too() -> None:
    model = Net()
    report = pipeline(model, (X,), split_spec={"b": SplitPoint.BEGINNING}, check=True).info().check

    assert report.left_out == ()


def test_what_the_first_call_leaves_behind_is_compared_in_a_second() -> None:
    # The plain model divides by the length of its first call for ever; a stage, which
    # computes the factor anew, by that of each.
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.factor: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.factor is None:
                self.factor = torch.full((), 1.0 / x.shape[1])
            x = self.a(x) * self.factor
            pipe_split()
            return self.b(x)

    with pytest.raises(TraceError, match="run: a second call"):
        pipeline(First(), (torch.randn(4, 6, 8),))
