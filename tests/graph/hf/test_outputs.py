"""What the model is asked to return besides its result: hidden states, attentions."""

import copy
import warnings

import pytest

from fxpipe import pipeline
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
