"""The table of a pipe and its code, as people read them."""

import pytest
import torch
from torch import nn

from fxpipe.errors import SplitError
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import pipeline
from fxpipe.planner.search.auto_split import auto_split
from tests.graph.pipes import pipe_of


def net(layers=6):
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])


X = torch.randn(2, 8)


def test_the_table_shows_what_each_stage_holds_receives_and_sends():
    lines = str(pipeline(net(), (X,), num_stages=2)).splitlines()

    assert lines[0] == "Sequential: 2 stages, 432 parameters in 12 tensors"
    assert lines[2].split() == ["stage", "modules", "parameters", "share", "receives", "sends"]
    assert "0-2" in lines[4]
    assert "216" in lines[4]
    assert "50%" in lines[4]
    assert "input (input)" in lines[4]
    assert "_2: float32[batch, 8] to 1" in lines[4]
    assert "(864 B)" in lines[5]
    assert "_2: float32[batch, 8] from 0" in lines[6]
    assert "the model's output" in lines[6]
    assert "dynamic: input dimension 0 (batch)" in lines
    assert "static: input dimension 1 = 8" in lines


def test_the_table_tells_of_ties_and_repeated_values():
    assert "tied: tokens.weight in stage 0, head.weight in stage 1" in str(pipe_of("gpt", 2))
    assert "computed again in stage 1, not sent: rotary_0, rotary_1" in str(pipe_of("llama", 2))


def test_columns_are_aligned():
    lines = str(pipe_of("unet", 4)).splitlines()
    rule = next(line for line in lines if line.startswith("-----"))
    starts = [i for i, c in enumerate(rule) if c == "-" and (i == 0 or rule[i - 1] == " ")]
    rows = lines[lines.index(rule) + 1 : lines.index("", 3)]

    for row in rows:
        for start in starts[1:]:
            assert row[start - 1 : start] in (" ", ""), row


def test_a_long_list_of_modules_is_shortened():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict(
                {f"a_rather_long_name_{'x' * i}": nn.Linear(8, 8) for i in range(20)}
            )

        def forward(self, x):
            for part in self.parts.values():
                x = part(x)
            return x

    text = str(pipeline(Wide(), (X,), num_stages=2))

    assert "more ..." in text
    assert len(text.splitlines()) < 20


def test_one_stage_of_a_bare_layer():
    assert str(pipeline(nn.Linear(8, 8), (X,), num_stages=1)).startswith("Linear: 1 stage, 72")


def test_print_readable_shows_interfaces_and_code(capsys):
    text = pipeline(net(2), (X,), num_stages=2).print_readable()

    assert capsys.readouterr().out == text
    assert "stage 1\n  receives _0: float32[batch, 8] from stage 0\ndef forward(self, _0):" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_stages": 2, "split_spec": {"1": SplitPoint.END}},
            "split_spec and num_stages are both given",
        ),
        (
            {"num_stages": 2, "split_policy": auto_split(2)},
            "split_policy and num_stages are both given",
        ),
        (
            {"split_spec": {"1": SplitPoint.END}, "split_policy": auto_split(2)},
            "split_spec and split_policy are both given",
        ),
        ({"num_stages": 0}, "whole number from 1 on, got 0"),
        ({"num_stages": "4"}, "whole number from 1 on, got '4'"),
        ({"num_stages": 7}, "cannot make 7 stages: the captured graph has 6 parts"),
        ({"num_stages": 2, "granularity": "ops"}, "'module' or 'op', got 'ops'"),
    ],
)
def test_requests_that_contradict_are_refused(options, message):
    with pytest.raises(SplitError, match=message):
        pipeline(net(), (X,), **options)
