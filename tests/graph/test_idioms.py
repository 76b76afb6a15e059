"""Idioms of real models: the pipe computes what the plain model computes, or says why not.

Each program is small and has one difficulty. `same` is the whole claim: equal outputs and
gradients for the example and for other values.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe import SplitPoint, pipeline
from fxpipe.errors import PipeliningShapeError
from fxpipe.graph.capture.capture import TracedGraph
from fxpipe.graph.cut import Assignment
from fxpipe.graph.flow import work_nodes

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
AT_B = {"b": SplitPoint.BEGINNING}


class AB(nn.Module):
    """Two layers with a cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)


def same(model: nn.Module, *calls: tuple[Any, ...], spec: Any = None) -> None:
    """Check that the pipe of a model, traced with the first call, does what the model does."""
    plain = copy.deepcopy(model)
    pipe = pipeline(model, calls[0], split_spec=spec or AT_B)

    for call in calls:
        torch.manual_seed(3)
        want = plain(*call)
        torch.manual_seed(3)
        got = pipe(*call)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        torch.testing.assert_close(ours.grad, theirs.grad)


class Difference(AB):
    def forward(self, p: torch.Tensor, q: torch.Tensor) -> Any:
        return self.b(self.a(p)) - q


def test_one_tensor_given_twice_is_two_inputs() -> None:
    # `input_ids=ids, labels=ids`: the first input used to be ignored in later calls.
    same(Difference(), (X, X), (X, -X), (-X, X))


class Scaled(AB):
    def forward(self, x: torch.Tensor, options: dict[str, float]) -> Any:
        return self.b(self.a(x) * options["scale"])


def test_a_constant_that_the_user_changes_later_is_refused() -> None:
    options = {"scale": 1.0}
    pipe = pipeline(Scaled(), (X, options), split_spec=AT_B)
    options["scale"] = 2.0

    with pytest.raises(PipeliningShapeError, match=r"options\['scale'\]: traced with 1.0, got 2.0"):
        pipe(X, options)


class Resized(AB):
    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Upsample(scale_factor=factor) for factor in factors)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        return self.b(x).sum() + sum(y.sum() / y.shape[2] for y in (up(x) for up in self.up))


def test_leaves_that_differ_in_a_number_are_not_equal() -> None:
    same(Resized(2.0, 0.5), (X,))


class Draws(nn.Module):
    """Dropouts, of which all but the first need little and could run in the first stage."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.mid = nn.Linear(8, 8)
        self.kinds = kinds
        self.drops = nn.ModuleList(nn.Dropout(0.5) for _ in kinds)
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        skip = self.a(x)
        total = nn.functional.dropout(self.mid(skip), 0.5)
        for kind, drop in zip(self.kinds, self.drops, strict=True):
            if kind == "leaf":
                total = total + drop(skip)
            elif kind == "function":
                total = total + nn.functional.dropout(skip, 0.5)
            else:
                total = total + torch.rand(8)
        return self.b(total)


def draws_early(traced: TracedGraph) -> Assignment:
    nodes = work_nodes(traced)
    late = {node for node in nodes if node.name in ("mid", "b", "add") or "add" in node.name}
    late |= {next(node for node in nodes if node.name == "dropout")}
    return Assignment({node.name: int(node in late) for node in nodes})


@pytest.mark.parametrize("first", ["leaf", "function", "rand"])
@pytest.mark.parametrize("second", ["leaf", "function", "rand"])
def test_draws_keep_their_order_wherever_they_are_put(first: str, second: str) -> None:
    model = Draws((first, second))
    pipe = pipeline(model, (X,), split_policy=draws_early)

    torch.manual_seed(3)
    want = model(X)
    torch.manual_seed(3)
    assert torch.equal(pipe(X), want)


def test_the_time_to_cut_behind_a_draw_does_not_double_with_each_layer() -> None:
    # 40 residual layers never came to an end.
    class Deep(AB):
        def forward(self, x: torch.Tensor) -> Any:
            z = torch.randn(4, 6, 8)
            for _ in range(40):
                z = z + torch.tanh(z)
            return self.b(self.a(x) + z)

    same(Deep(), (X,))
