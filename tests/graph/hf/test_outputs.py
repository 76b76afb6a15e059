"""What the model is asked to return besides its result: hidden states, attentions."""

import copy
import warnings

import pytest

from fxpipe import SplitPoint, pipeline
from tests.graph.hf.inputs import Shape
from tests.graph.hf.registry import case
from tests.parity import assert_parity


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_hidden_states_and_attentions_are_those_of_the_plain_model(model_type: str) -> None:
    # Hooks collect them from modules, some of which are deep inside leaves: those used
    # to be tensors that nobody knew, and equal leaves did not run at all.
    one = case(model_type)
    model = one.build().eval()
    model.config._attn_implementation = "eager"
    plain = copy.deepcopy(model)
    inputs = {
        **one.inputs(model, Shape()),
        "output_hidden_states": True,
        "output_attentions": True,
    }

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pipeline(model, (), inputs, num_stages=2)

        assert_parity(plain, pipe, (), inputs)
    assert len(pipe(**inputs).attentions) == len(pipe(**inputs).hidden_states) - 1


def test_a_tower_that_collects_its_own_hidden_states_stays_whole() -> None:
    # The hooks of its layers keep what they see for the tower itself. It was opened, as if
    # code around it had asked, and then each of its layers was a call of its own.
    one = case("vipllava")
    model = one.build().eval()
    plain = copy.deepcopy(model)
    inputs = one.inputs(model, Shape())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = {"model.language_model.layers.1": SplitPoint.BEGINNING}
        pipe = pipeline(model, (), inputs, split_spec=spec)

        assert_parity(plain, pipe, (), inputs)
    called = [str(node.target) for node in pipe.stages[0].module.graph.nodes]
    assert "model.vision_tower" in called
