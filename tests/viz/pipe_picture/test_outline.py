import pytest
import torch
from torch import nn

from fxpipe.errors import FxpipeError
from fxpipe.graph.dims import symbol
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import pipeline
from fxpipe.viz.pipe_picture.outline import make_outline, ranges_text, tensor_bytes
from tests.viz.pipes import outline_of, pipe_of, sizes_of


def test_crossings_say_what_travels_and_between_which_parts():
    outline = outline_of("unet")

    found = [
        (c.source, c.source_part, c.target, c.target_parts, c.name, c.size, c.is_skip)
        for c in outline.crossings
    ]
    assert found == [
        (0, 1, 1, (0,), "down_0_0", "4.1 kB", False),
        (1, 1, 2, (0,), "down_2_0", "1.02 kB", False),
        (1, 1, 2, (1,), "down_2_1", "4.1 kB", False),
        (2, 1, 3, (0,), "up_0", "2.05 kB", False),
        (1, 0, 3, (0,), "down_1_1", "8.19 kB", True),
        (0, 1, 3, (1,), "down_0_1", "16.4 kB", True),
    ]


class Masked(nn.Module):
    """Six layers that all read what the first stage makes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(6))

    def forward(self, x):
        memory = self.first(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def test_value_for_many_stages_is_listed_once():
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, 6)}
    pipe = pipeline(Masked(), (torch.zeros(2, 4),), split_spec=spec)

    outline = make_outline(pipe, "stages")

    (shared,) = outline.shared
    assert [(c.source, c.target, c.name) for c in shared] == [(0, s, "first") for s in range(1, 6)]
    assert {crossing.is_skip for crossing in outline.crossings} == {False}


def test_ties_name_parts():
    (tie,) = outline_of("gpt").ties

    assert tie.places == ((0, 0, "tokens.weight"), (3, 2, "head.weight"))


def test_inputs_and_outputs_know_their_parts():
    outline = outline_of("encoder_decoder")

    assert [(t.text, t.parts) for t in outline.stages[0].inputs] == [
        ("source_mask: bool[batch, sequence]", (1,)),
        ("source_ids: int64[batch, sequence]", (0,)),
    ]
    assert [t.parts for t in outline.stages[2].inputs] == [(0,)]
    assert [t.parts for t in outline.stages[3].outputs] == [(2,), ()]
    assert not outline.stages[2].outputs


def test_load_is_by_time_else_flops_else_parameters():
    pipe = pipe_of("gpt")
    flops, times = [1e6, 2e6, 3e6, 4e6], [4.0, 4.0, 4.0, 8.0]

    by_time = make_outline(pipe, "stages", flops=flops, times=times)
    by_flops = make_outline(pipe, "stages", flops=flops)
    by_parameters = make_outline(pipe, "stages")

    assert (by_time.load, [s.share for s in by_time.stages]) == ("time", [0.2, 0.2, 0.2, 0.4])
    assert (by_flops.load, [s.share for s in by_flops.stages]) == ("FLOPs", [0.1, 0.2, 0.3, 0.4])
    assert by_parameters.load == "parameters"
    assert sum(stage.share for stage in by_parameters.stages) == pytest.approx(1)
    assert by_flops.stages[1].facts == "12.7 k parameters, 2 MFLOPs"


def test_figures_must_be_given_for_every_stage():
    with pytest.raises(FxpipeError, match="flops has 3 entries, but the pipe has 4 stages"):
        make_outline(pipe_of("gpt"), "stages", flops=[1, 2, 3])


def test_unknown_depth_is_refused():
    with pytest.raises(FxpipeError, match="depth is one of stages, blocks, nodes; got 'modules'"):
        make_outline(pipe_of("gpt"), "modules")


def test_summary_names_the_sizes_used():
    pipe = pipe_of("gpt")

    assert make_outline(pipe, "stages", sizes={"batch": 2, "sequence": 8, "other": 3}).summary == (
        "59.1 k parameters, 4 stages; a microbatch has batch = 2, sequence = 8"
    )
    assert make_outline(pipe, "stages").summary == "59.1 k parameters, 4 stages"
    assert sizes_of("gpt") == {"batch": 2, "sequence": 8}


def test_bytes_are_a_formula_without_sizes():
    spec = TensorSpec((symbol("batch"), 4, symbol("length")), torch.bfloat16)

    assert tensor_bytes(spec, {}) == "8*batch*length B"
    assert tensor_bytes(spec, {"batch": 2}) == "8*batch*length B"
    assert tensor_bytes(spec, {"batch": 2, "length": 64}) == "1.02 kB"
    assert tensor_bytes(TensorSpec((), torch.int64), {}) == "8 B"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((3,), "stage 3"), ((1, 2, 3), "stages 1–3"), ((5, 1, 2), "stages 1–2, 5")],
)
def test_ranges_are_short(numbers, text):
    assert ranges_text(numbers) == text
