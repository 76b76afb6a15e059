"""Idioms of real models: the pipe computes what the plain model computes, or says why not.

Each program is small and has one difficulty. `same` is the whole claim: equal outputs and
gradients for the example and for other values.
"""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe import SplitPoint, pipeline
from fxpipe.errors import InputError, PipeliningShapeError, SplitError, TraceError
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.cut import Assignment
from fxpipe.graph.cut.flow import work_nodes

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
    for name, ours in model.named_parameters():
        theirs = plain.get_parameter(name)
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


class Clamps(AB):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        x.data = x.data.clamp(-0.1, 0.1)
        return self.b(x)


class Normalises(AB):
    def forward(self, x: torch.Tensor) -> Any:
        self.a.weight.data = nn.functional.normalize(self.a.weight.data)
        return self.b(self.a(x))


class Forces(AB):
    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        energy = self.b(torch.tanh(self.a(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Clamps, "an assignment to .data"),
        (Normalises, "an assignment to .data"),
        (Forces, "torch.autograd.grad"),
    ],
)
def test_an_effect_that_no_graph_repeats_is_refused_by_line(kind: type[AB], words: str) -> None:
    with pytest.raises(TraceError, match=rf"as a graph: {words}\n.*test_idioms.py:\d+\n"):
        pipeline(kind(), (X,), split_spec=AT_B)


class Hooks(AB):
    """A hook on a tensor that two stages use."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        y = self.b(x)
        x.register_hook(lambda gradient: gradient * 0.5)
        return y + x


def test_a_hook_on_a_tensor_sees_the_whole_gradient() -> None:
    same(Hooks(), (X,), (-X,))


class Generated(AB):
    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        weight = self.gen(x.mean((0, 1))).view(8, 8)
        return torch.func.functional_call(self.b, {"weight": weight}, (x,))


class Swaps(AB):
    def forward(self, x: torch.Tensor) -> Any:
        x, weight = self.a(x), self.b.weight
        del self.b.weight
        self.b.weight = weight * 2
        y = self.b(x)
        del self.b.weight
        self.b.weight = weight
        return y


@pytest.mark.parametrize("kind", [Generated, Swaps])
def test_a_leaf_with_other_weights_computes_with_them(kind: type[AB]) -> None:
    spec = AT_B if kind is Swaps else {"gen": SplitPoint.BEGINNING}
    same(kind(), (X,), (-X,), spec=spec)


class Expert(nn.Module):
    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.inner = Expert(False) if inner else nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inner(x)
        self.aux = (x**2).mean()
        return x


class Mixture(nn.Module):
    """Reads what its leaves keep on themselves, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Expert(False), Expert(True)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b(self.a(x))
        return y.sum() + self.a.aux + self.b.inner.aux


@pytest.mark.parametrize("has_run", [False, True])
def test_what_leaves_keep_on_themselves_is_read_anew(has_run: bool) -> None:
    model = Mixture()
    if has_run:
        with torch.no_grad():
            model(X)
            for part in (model.a, model.b, model.b.inner):
                part.aux = part.aux.clone()

    same(model, (X,), (-X,))


class Sign(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, bool(x.sum() > 0)


class Branches(AB):
    def __init__(self) -> None:
        super().__init__()
        self.sign = Sign()

    def forward(self, x: torch.Tensor) -> Any:
        x, positive = self.sign(self.a(x))
        return self.b(x) if positive else -self.b(x)


def test_a_flag_that_a_leaf_computes_is_compared() -> None:
    model = Branches()
    pipe = pipeline(model, (X,), split_spec=AT_B)

    refused = 0
    for shift in (-100, 100):
        try:
            torch.testing.assert_close(pipe(X + shift), model(X + shift))
        except InputError as error:
            assert "gave" in str(error)
            refused += 1
    assert refused == 1


class Shares(AB):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x) * 1
        short = self.same(x)
        short += self.b(x.detach() * 2)
        return x + short


def test_memory_that_a_leaf_hands_on_does_not_change_in_another_stage() -> None:
    with pytest.raises(SplitError, match=r"same returns its argument itself, .*test_idioms.py:\d+"):
        pipeline(Shares(), (X,), split_spec=AT_B)
    same(Shares(), (X,), spec={"a": SplitPoint.END})


class Asks(AB):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        return self.b(x * 2 if x.requires_grad else x)


def test_whether_a_tensor_requires_a_gradient_is_the_models_answer() -> None:
    frozen = Asks()
    frozen.a.requires_grad_(False)
    same(frozen, (X,))
    model = Asks()
    pipe = pipeline(model, (X,), split_spec=AT_B)

    with torch.no_grad(), pytest.raises(TraceError, match=r"is True; it is False now"):
        pipe(X)


class Sparse(AB):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph_of_nodes", torch.eye(6).to_sparse())

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.sparse.mm(self.graph_of_nodes, self.a(x)))


def test_sparse_buffers_and_scripted_leaves() -> None:
    class Scripted(AB):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch deprecates scripting
                self.m = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(self.m(self.a(x)))

    model = Sparse()
    torch.testing.assert_close(pipeline(model, (X[0],), split_spec=AT_B)(X[0]), model(X[0]))
    scripted = Scripted()
    pipe = pipeline(scripted, (X,), split_spec=AT_B)
    torch.testing.assert_close(pipe(-X), scripted(-X))


class Bunch(dict[str, torch.Tensor]):
    pass


class Takes(nn.Module):
    def forward(self, parts: Any) -> Any:
        return sum(parts.values() if isinstance(parts, dict) else parts)


class Gives(AB):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.takes, self.random = how, Takes(), random.Random(0)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        if self.how == "seed":
            torch.manual_seed(5)
        if self.how == "generator":
            x = x + torch.randn(8, generator=torch.Generator().manual_seed(4))
        if self.how == "random":
            x = x * self.random.random()
        parts = {"iterator": (t for t in (x, x)), "bunch": Bunch(x=x)}.get(self.how, [x])
        return self.b(self.takes(parts))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("seed", "manual_seed"),
        ("generator", "a torch.Generator of its own"),
        ("random", "draws a random number"),
        ("iterator", "a generator as argument"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(how: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        pipeline(Gives(how), (X,), split_spec=AT_B)


def test_an_object_derived_from_dict_is_made_anew() -> None:
    same(Gives("bunch"), (X,), (-X,), spec={"takes": SplitPoint.BEGINNING})
