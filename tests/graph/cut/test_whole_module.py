"""A pipe is a module: it moves, saves and loads as the model does, and shows its graph."""

import copy

import pytest
import torch
from torch import nn

from fxpipe import Pipe, SplitError, SplitPoint, pipe_split, pipeline
from fxpipe.graph.markers import annotate_split_points


class Skipping(nn.Module):
    """A buffer, a weight that two stages hold, and a value that passes a stage by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x, scale):
        kept = self.first(x)
        pipe_split()
        x = self.norm(kept)
        pipe_split()
        return self.last(x) + kept * scale


def split():
    torch.manual_seed(0)
    model = Skipping()
    x, scale = torch.randn(6, 4), torch.randn(6, 1)
    return model, pipeline(model, (x,), {"scale": scale}), x, scale


def test_the_state_has_the_names_of_the_model():
    model, pipe, _, _ = split()

    assert isinstance(pipe, nn.Module)
    assert set(pipe.state_dict()) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], value), name
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}


def test_a_state_is_loaded_into_all_stages():
    model, pipe, x, scale = split()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            value.add_(1)

    pipe.load_state_dict(other.state_dict())

    torch.testing.assert_close(pipe.eval()(x, scale=scale), other.eval()(x, scale))
    state = dict(other.state_dict())
    state["first.wait"] = state.pop("first.bias")
    with pytest.raises(RuntimeError, match=r"lacks \['first.bias'\].*unknown \['first.wait'\]"):
        pipe.load_state_dict(state)
    assert pipe.load_state_dict(state, strict=False).missing_keys == ["first.bias"]


def test_a_pipe_moves_as_a_whole():
    model, pipe, x, scale = split()

    moved = pipe.to(torch.float64)

    assert moved is pipe
    expected = copy.deepcopy(model).double()(x.double(), scale.double())
    torch.testing.assert_close(pipe(x.double(), scale=scale.double()), expected)


def test_the_graph_calls_the_stages_and_computes_the_model():
    model, pipe, x, scale = split()

    found = pipe.split_gm

    calls = [node.target for node in found.graph.nodes if node.op == "call_module"]
    assert calls == ["submod_0", "submod_1", "submod_2"]
    torch.testing.assert_close(found.eval()(x, scale), model.eval()(x, scale))


def test_from_tracing_splits_at_the_markers():
    model, _, x, scale = split()

    pipe = Pipe.from_tracing(model, (x,), {"scale": scale})

    assert pipe.num_stages == 3


def test_a_policy_written_for_torch_is_told_what_it_gets():
    model, _, x, scale = split()

    with pytest.raises(SplitError, match="returned a TracedGraph, needed an Assignment"):
        pipeline(model, (x, scale), split_policy=lambda traced: traced)
    with pytest.raises(AttributeError) as raised:
        pipeline(model, (x, scale), split_policy=lambda traced: traced.recompile())
    assert "not an exported GraphModule" in "".join(raised.value.__notes__)


def test_a_module_that_is_not_there_is_an_attribute_error_too():
    model, _, x, scale = split()

    for ask in (
        lambda: pipeline(model, (x, scale), split_spec={"frist": SplitPoint.BEGINNING}),
        lambda: annotate_split_points(model, {"frist": SplitPoint.BEGINNING}),
    ):
        with pytest.raises(AttributeError, match="'frist' is not a submodule"):
            ask()
