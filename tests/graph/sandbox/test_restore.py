"""A trace leaves the model and the process as they were, also after an error."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpipe import TraceError, pipe_split, pipeline
from fxpipe.graph.sandbox.fake import probe
from fxpipe.graph.sandbox.restore import preserved, preserved_values

X = torch.randn(4, 8)


class Busy(nn.Module):
    """Changes everything it can reach."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.log: list[int] = []
        self.seen = {"calls": 0}
        self.kinds = {1}
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        self.seen["calls"] += 1
        self.kinds.add(2)
        self.new = x
        x = self.norm(self.a(x)) + torch.rand(())
        self.a.weight.requires_grad_(False)
        self.b.training = False
        pipe_split()
        if self.fails and x.sum() > 0:
            x = x + 1
        return self.b(x)

    @functools.cached_property
    def scale(self) -> float:
        return 2.0


def state_of(model: nn.Module) -> object:
    return (
        [(sorted(vars(part)), part.training) for part in model.modules()],
        [(id(p), p.requires_grad, p._version) for p in model.parameters()],
        {name: value.tolist() for name, value in model.state_dict().items()},
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        nn.Module.__call__,
        torch.autograd.Function.apply,
    )


def contents_of(model: Busy) -> object:
    return (list(model.log), dict(model.seen), set(model.kinds))


def test_nothing_is_left_of_a_trace() -> None:
    model = Busy()
    before = (state_of(model), contents_of(model))

    with pytest.raises(TraceError, match=r"reads 'seen' .* and changes what is in it"):
        pipeline(model, (X,))

    assert (state_of(model), contents_of(model)) == before


def test_nothing_is_left_of_a_trace_that_failed() -> None:
    model = Busy(fails=True)
    before = (state_of(model), contents_of(model))

    with pytest.raises(TraceError, match="decides"):
        pipeline(model, (X,))

    assert (state_of(model), contents_of(model)) == before


def test_nothing_is_left_of_a_probe() -> None:
    model = Busy()
    fired: list[int] = []
    model.norm.register_forward_hook(lambda *_: fired.append(1))
    before = (state_of(model), contents_of(model))

    output = probe(model, (X,))

    assert output.shape == (4, 8)
    assert (state_of(model), contents_of(model), fired) == (*before, [])


def test_a_probe_of_code_that_needs_values_runs_it_on_made_up_ones() -> None:
    model, x = Busy(fails=True), torch.randn(6, 8)
    before = (state_of(model), contents_of(model))

    output = probe(model, (x,))

    assert output.shape == (6, 8)
    assert (state_of(model), contents_of(model)) == before


def test_objects_keep_their_identity() -> None:
    model = Busy()
    log, seen, weight = model.log, model.seen, model.a.weight

    with preserved(model):
        model(X)
        model.log, model.a.weight = [3], nn.Parameter(torch.zeros(8, 8))

    assert model.log is log
    assert model.seen is seen
    assert model.a.weight is weight
    assert log == []


def test_contents_of_tensors_are_restored_on_demand() -> None:
    model = Busy()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with preserved_values(model):
        model(X)
        with torch.no_grad():
            model.a.weight.zero_()

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
