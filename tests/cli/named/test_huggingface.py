"""Models named hf:..., from a configuration alone."""

import json
from pathlib import Path

import pytest

from fxpipe.cli.named.models import ModelRequest, resolve
from fxpipe.errors import InputError
from tests.cli.run import fxpipe_json

TINY = (
    "hf:llama?num_hidden_layers=4&hidden_size=16&intermediate_size=32&vocab_size=50"
    "&num_attention_heads=2&num_key_value_heads=2&max_position_embeddings=64"
)


def test_a_configuration_is_split_without_weights() -> None:
    found = fxpipe_json("trace", TINY, "--stages", "2", "--seq", "8")

    assert found["num_stages"] == 2
    assert "model.layers.0" in found["stages"][0]["modules"]
    assert "lm_head" in found["stages"][1]["modules"]
    assert sum(stage["parameters"] for stage in found["stages"]) == 50 * 16 * 2 + 16 + 4 * (
        4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    )
    assert "input_ids" in found["inputs"]


def test_a_model_has_inputs_a_target_and_a_loss() -> None:
    model = resolve(ModelRequest(TINY, seq=6, seed=1))

    _, kwargs = model.inputs(3, seed=2)
    output = model.build()(**kwargs)
    loss = model.loss_fn(output, model.target(3, seed=2))

    assert kwargs["input_ids"].shape == (3, 6)
    assert output.logits.shape == (3, 6, 50)
    assert loss.ndim == 0 and loss.item() > 0


def test_a_file_names_the_type_and_the_class(tmp_path: Path) -> None:
    fields = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    fields |= {"num_attention_heads": 2, "intermediate_size": 8, "architectures": ["BertModel"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))

    in_file = resolve(ModelRequest(f"hf:{path}")).build(meta=True)
    changed = resolve(ModelRequest(f"hf:{tmp_path}?num_hidden_layers=2&class=BertForMaskedLM"))

    assert type(in_file).__name__ == "BertModel"
    assert type(changed.build(meta=True)).__name__ == "BertForMaskedLM"
    assert changed.build(meta=True).config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:lama", "transformers knows no model type 'lama'; did you mean .*llama"),
        ("hf:llama?num_hiden_layers=4", "LlamaConfig has no field 'num_hiden_layers' .*closest"),
        ("hf:llama?hidden_size=wide", "LlamaConfig refuses these values: "),
        ("hf:nowhere.json", "cannot read the configuration nowhere.json: No such file"),
    ],
)
def test_refuses(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(ModelRequest(name))


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"hidden_size": 8}')

    with pytest.raises(InputError, match="it has no 'model_type'"):
        resolve(ModelRequest(f"hf:{path}"))


def test_a_length_beyond_the_model_and_an_unknown_class_are_refused() -> None:
    with pytest.raises(InputError, match="--seq 65 is longer than hf:llama allows, 64"):
        resolve(ModelRequest(TINY, seq=65)).inputs(1)
    with pytest.raises(InputError, match="has no model class 'LlamaForEverything'"):
        resolve(ModelRequest(f"{TINY}&class=LlamaForEverything")).build(meta=True)
