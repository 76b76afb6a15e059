"""FLOPs of the stages together are those of the model, counted by torch."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

import models
from tests.graph.pipes import pipe_of
from tests.parity import build_split


@pytest.mark.parametrize("name", models.NAMES)
def test_stages_add_up_to_the_model(name):
    model, _ = build_split(name, 4)
    args, kwargs = models.load(name).example_inputs(2)
    pipe = pipe_of(name, 4)

    with FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)

    assert sum(pipe.flops()) == counter.get_total_flops() > 0


def test_flops_at_other_sizes():
    pipe = pipe_of("gpt", 2)

    assert sum(pipe.flops({"batch": 6})) == 3 * sum(pipe.flops())
