"""A split is saved, loaded and used to cut again; ranks compare its hash."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import models
from fxpipe.errors import InputError, PipeliningShapeError, SplitError
from fxpipe.graph.info import PipeInfo
from fxpipe.graph.pipe import pipeline
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
def test_every_model_has_a_split_that_survives_a_file(name, tmp_path):
    info = pipe_of(name, 2).info()

    again = PipeInfo.load(info.save(tmp_path / "split.json"))

    assert again == info.policy
    assert again.hash == info.hash


def test_a_saved_split_cuts_again_without_a_search(tmp_path):
    module = models.load("llama")
    args, kwargs = module.example_inputs(2)
    model = module.build()
    pipe = pipeline(model, args, kwargs, num_stages=3)

    saved = PipeInfo.load(pipe.info().save(tmp_path / "split.json"))
    again = pipeline(model, args, kwargs, split_policy=saved.policy)

    assert again.info().hash == pipe.info().hash
    assert [s.module.code for s in again.stages] == [s.module.code for s in pipe.stages]


def test_inputs_are_judged_by_what_was_traced():
    info = scaled().info()
    bias = torch.ones(8)

    assert info.bind_inputs(
        (torch.randn(5, 8), {"factors": (2.0, 3), "bias": bias}), {"flag": True}
    ) == {"batch": 5}
    with pytest.raises(PipeliningShapeError, match=r"factors.*traced with 2\.0, got 4\.0"):
        info.bind_inputs((torch.randn(5, 8), {"factors": (4.0, 3), "bias": bias}), {"flag": True})
    with pytest.raises(PipeliningShapeError, match=r"expected float32\[batch, 8\]"):
        info.bind_inputs((torch.randn(5, 9), {"factors": (2.0, 3), "bias": bias}), {"flag": True})


def odd_and_scaled_hashes():
    odd = pipeline(Odd(), (torch.randn(2, 4), Custom()), num_stages=2)
    return [scaled().info().hash, odd.info().hash]


def test_hash_is_the_same_in_every_process():
    code = "from tests.graph.test_info import odd_and_scaled_hashes as f; print(*f())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than this process has

    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip

    assert run.stdout.split() == odd_and_scaled_hashes()
    assert len(set(run.stdout.split())) == 2


def test_the_hash_tells_constants_apart():
    assert scaled(2.0).info().hash == scaled(2.0).info().hash
    assert scaled(2.0).info().hash != scaled(2.5).info().hash


def test_a_split_of_another_model_is_refused():
    args = (torch.randn(2, 8),)
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
    large = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    plan = pipeline(small, args, num_stages=2).info()

    with pytest.raises(SplitError, match="another model") as caught:
        pipeline(large, args, split_policy=plan.policy)

    assert "not in the split: _2" in str(caught.value)
    with pytest.raises(SplitError, match="only in the split: _2"):
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


def test_an_input_without_a_text_form_has_a_hash():
    info = pipeline(Odd(), (torch.randn(2, 4), Custom()), num_stages=2).info()

    assert info.hash == pipeline(Odd(), (torch.randn(2, 4), Custom()), num_stages=2).info().hash


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-5], "cannot read the split"),
        (lambda text: "[1, 2]", "is not a split"),
        (lambda text: text.replace('"fxpipe split"', '"else"'), "is not a split"),
        (lambda text: text.replace('"version": 2', '"version": 99'), "version 99"),
        (lambda text: text.replace('"stage_of"', '"stages_of"'), "is damaged"),
        (lambda text: text.replace(": 1", ': "1"'), "is damaged"),
        (lambda text: text.replace('"layers"', "17"), "is damaged"),
    ],
)
def test_damaged_splits_are_refused(damage, message, tmp_path):
    path = scaled().info().save(tmp_path / "split.json")
    text = path.read_text()
    broken = damage(text)
    assert broken != text
    path.write_text(broken)

    with pytest.raises(InputError, match=message):
        PipeInfo.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the split .*nowhere\.json"):
        PipeInfo.load(tmp_path / "nowhere.json")
