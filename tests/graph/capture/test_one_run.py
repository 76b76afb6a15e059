"""A capture says how often the model ran, and why; an error is told once, the first one."""

import logging

import pytest
import torch
from torch import nn

from fxpipe import TraceError, pipe_split, pipeline
from fxpipe.graph.capture.capture import capture, capture_for
from fxpipe.graph.capture.traced_graph import UnknownSizeError

X = torch.randn(2, 4)


@pytest.fixture
def told(caplog):
    """The lines of the log that say how often a model ran."""
    caplog.set_level(logging.INFO, logger="fxpipe.graph.capture.capture")
    return lambda: [r.getMessage() for r in caplog.records if " ran " in r.getMessage()]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pipe_split()
        return self.second(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def test_plain_model_runs_once(told):
    pipeline(Inner(), (X,))

    assert told() == ["Inner ran 1 times on tensors without data: to record it"]


def test_split_inside_a_leaf_takes_a_second_run(told):
    pipeline(Outer(), (X,))

    assert told() == [
        "Outer ran 2 times on tensors without data: to record it; "
        "to open inner, where a split was found"
    ]


class AsksForMode(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 2 if self.training else x


def test_code_that_asks_for_the_mode_runs_in_both(told):
    pipeline(AsksForMode(), (X,))

    assert told() == [
        "AsksForMode ran 2 times on tensors without data: to record it; in evaluation mode"
    ]


class FixesLength(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 2 and type(x.shape[0]) is not int:
            raise ValueError("only plain sizes")
        return super().forward(x)


def test_model_that_takes_no_symbols_says_so(told):
    traced = capture(FixesLength(), (X,))

    assert traced.symbols == ()
    (line,) = told()
    assert "with fewer sizes open (the model cannot be traced with this size open at " in line


def test_user_of_a_graph_gets_one_that_follows_the_example(told):
    asked = []

    def use(traced):
        asked.append(traced)
        if len(asked) == 1:
            raise UnknownSizeError("how long is it?")
        return "used"

    assert capture_for(use, Inner(), (X,)) == "used"
    assert told() == [
        "Inner ran 2 times on tensors without data: to record it; "
        "with the values of the example (how long is it?)"
    ]


def test_first_error_is_told_if_the_example_does_not_help():
    def use(traced):
        raise UnknownSizeError("how long is it?")

    with pytest.raises(UnknownSizeError, match="how long is it"):
        capture_for(use, Inner(), (X,))


def test_error_of_the_user_of_a_graph_is_not_tried_again():
    calls = []

    def use(traced):
        calls.append(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture_for(use, Inner(), (X,))
    assert len(calls) == 1


class Fails(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, 5, 3)


def test_failing_model_is_an_error_with_its_line():
    with pytest.raises((TraceError, RuntimeError)) as caught:
        capture(Fails(), (X,))

    notes = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "test_one_run.py" in notes
