"""A plan without modules: saved, loaded, compared by hash, and used to cut again."""

import json

import pytest
import torch
from torch import nn

import models
from fxpipe.errors import InputError, PipeliningShapeError, SplitError
from fxpipe.graph.info import PipeInfo
from fxpipe.graph.pipe import pipeline
from fxpipe.stage import build_stage
from tests.graph.pipes import pipe_of


class Scaled(nn.Module):
    """Constants, nests and a default among the inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, options, *, scale=1.0, flag=None):
        for layer in self.layers:
            x = layer(x) * options["factors"][0] * scale
        return x + options["bias"] if flag else x


def scaled(factor=2.0):
    x = torch.randn(3, 8)
    options = {"factors": (factor, 3), "bias": torch.ones(8)}
    return pipeline(Scaled(), (x, options), {"flag": True}, num_stages=2)


@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_has_a_plan_that_survives_json(name):
    pipe = pipe_of(name, 2)

    again = PipeInfo.from_json(pipe.info().to_json())

    assert again == pipe.info()
    assert again.hash == pipe.info().hash


def test_a_saved_plan_cuts_again_without_a_search(tmp_path):
    module = models.load("llama")
    args, kwargs = module.example_inputs(2)
    model = module.build()
    pipe = pipeline(model, args, kwargs, num_stages=3)

    saved = PipeInfo.load(pipe.info().save(tmp_path / "plan.json"))
    again = pipeline(model, args, kwargs, split_policy=saved.policy)

    assert again.info().hash == pipe.info().hash
    assert [s.module.code for s in again.stages] == [s.module.code for s in pipe.stages]


def test_a_loaded_plan_builds_stages():
    pipe = scaled()
    info = PipeInfo.from_json(pipe.info().to_json())

    stage = build_stage(pipe.get_stage_module(1), 1, info, torch.device("cpu"))

    assert stage.submod is pipe.get_stage_module(1)
    assert stage.num_stages == 2


def test_a_loaded_plan_judges_inputs_like_the_first():
    info = PipeInfo.from_json(scaled().info().to_json())
    bias = torch.ones(8)

    assert info.bind_inputs(
        (torch.randn(5, 8), {"factors": (2.0, 3), "bias": bias}), {"flag": True}
    ) == {"batch": 5}
    with pytest.raises(PipeliningShapeError, match=r"factors.*traced with 2\.0, got 4\.0"):
        info.bind_inputs((torch.randn(5, 8), {"factors": (4.0, 3), "bias": bias}), {"flag": True})
    with pytest.raises(PipeliningShapeError, match=r"expected float32\[batch, 8\]"):
        info.bind_inputs((torch.randn(5, 9), {"factors": (2.0, 3), "bias": bias}), {"flag": True})


def test_the_hash_tells_constants_apart():
    assert scaled(2.0).info().hash == scaled(2.0).info().hash
    assert scaled(2.0).info().hash != scaled(2.5).info().hash


def test_a_plan_of_another_model_is_refused():
    args = (torch.randn(2, 8),)
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
    large = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    plan = pipeline(small, args, num_stages=2).info()

    with pytest.raises(SplitError, match="another model") as caught:
        pipeline(large, args, split_policy=plan.policy)

    assert "not in the plan: _2" in str(caught.value)
    with pytest.raises(SplitError, match="only in the plan: _2"):
        pipeline(small, args, split_policy=pipeline(large, args, num_stages=2).info().policy)


class Custom:
    def __eq__(self, other):
        return isinstance(other, Custom)

    def __hash__(self):
        return 1


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x, how):
        return self.layers(x)


def test_an_input_without_a_json_form_is_named():
    info = pipeline(Odd(), (torch.randn(2, 4), Custom()), num_stages=2).info()

    with pytest.raises(InputError, match=r"'how' holds a .*Custom"):
        info.to_json()
    assert info.hash  # ranks can still compare


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-5], "not JSON"),
        (lambda text: "[1, 2]", "not a plan"),
        (lambda text: text.replace('"fxpipe plan"', '"else"'), "not a plan"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "version 99"),
        (lambda text: text.replace('"sends"', '"sendz"'), "damaged: KeyError: 'sends'"),
        (lambda text: text.replace('"float32"', '"floatx"'), "damaged: AttributeError"),
        (lambda text: text.replace('"batch"', '"__import__(1)"'), "cannot read|damaged"),
    ],
)
def test_damaged_plans_are_refused(damage, message):
    text = scaled().info().to_json()
    broken = damage(text)
    assert broken != text

    with pytest.raises(InputError, match=message):
        PipeInfo.from_json(broken)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the plan .*nowhere\.json"):
        PipeInfo.load(tmp_path / "nowhere.json")


def test_symbols_with_odd_names_survive():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, max):
            return self.layers(max)

    info = pipeline(Named(), (torch.randn(2, 6, 4),), num_stages=2).info()

    assert PipeInfo.from_json(info.to_json()) == info


def test_json_is_readable():
    data = json.loads(scaled().info().to_json())

    assert data["stages"][0]["sends"][0][1]["shape"] == ["batch", "8"]
    assert data["inputs"]["example"]["flag"] is True
