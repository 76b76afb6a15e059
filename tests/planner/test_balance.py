"""Splits by cost are never less even than equal layers or parameter counts."""

import pytest

from benchmarks.auto_split import balance
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.markers import choose_opened
from tests.planner.zoo import NAMES, example


@pytest.mark.parametrize("name", NAMES)
def test_split_by_cost_is_the_most_even(name):
    found = example(name)
    graph = capture(found.model, found.args, found.kwargs, opened=choose_opened(found.model, 4))

    ratios = balance(graph, 4)

    assert ratios["cost"] <= ratios["layers"] * 1.0001
    assert ratios["cost"] <= ratios["parameters"] * 1.0001
