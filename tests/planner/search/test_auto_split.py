import pytest
import torch
from torch import nn

from fxpipe import pipeline
from fxpipe.errors import SplitError
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.pipe import Pipe
from fxpipe.planner.search.auto_split import auto_split
from fxpipe.program import Placement
from models import gpt, unet
from tests.parity import assert_parity


class Uneven(nn.Module):
    """Layers whose cost differs, with a tied first and last weight."""

    def __init__(self, widths=(8, 64, 8, 8, 8)):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for width in widths
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def split(model, args, policy, opened=("", "layers")):
    return Pipe(graph := capture(model, args, opened=opened), policy(graph))


def layers_of(pipe):
    return [
        sorted({name.split(".")[1] for name in stage.module.state_dict()}) for stage in pipe.stages
    ]


def test_stages_are_balanced_by_cost():
    pipe = split(Uneven(), (torch.randn(512, 8),), auto_split(2))

    assert layers_of(pipe) == [["0", "1"], ["2", "3", "4"]]


def test_pins_and_groups_are_kept():
    args = (torch.randn(512, 8),)

    pinned = split(Uneven(), args, auto_split(2, pin={"layers.1": 1}))
    grouped = split(Uneven(), args, auto_split(2, together=[("layers.0", "layers.3")]))

    assert layers_of(pinned) == [["0"], ["1", "2", "3", "4"]]
    assert layers_of(grouped) == [["0", "1", "2", "3"], ["4"]]


def test_memory_limit_moves_the_cut():
    args = (torch.randn(4, 8),)
    model = Uneven((8, 8, 8, 512, 8))

    free = split(model, args, auto_split(2))
    tight = split(model, args, auto_split(2, memory_limit=[4e3, 1e9]))

    assert len(layers_of(tight)[0]) < len(layers_of(free)[0])


def test_missing_memory_is_an_error_with_the_amount():
    policy = auto_split(2, memory_limit=100)

    with pytest.raises(SplitError, match=r"rank 0 \(stage 0.*missing"):
        split(Uneven(), (torch.randn(4, 8),), policy)


def test_unknown_and_inner_names_are_explained():
    args = (torch.randn(4, 8),)

    with pytest.raises(SplitError, match=r"no module 'layer.1' runs in this model; did you mean"):
        split(Uneven(), args, auto_split(2, pin={"layer.1": 0}))
    with pytest.raises(SplitError, match=r"'layers.0.2' is inside 'layers.0', which stays in one"):
        split(Uneven(), args, auto_split(2, pin={"layers.0.2": 0}))
    with pytest.raises(SplitError, match="cannot make 9 stages: the captured graph has 5 parts"):
        split(Uneven(), args, auto_split(9))


def test_ranks_with_two_stages_are_balanced_by_their_sum():
    placement = Placement.v(2, 4)
    policy = auto_split(4, placement=placement)

    pipe = split(Uneven((8, 64, 8, 8, 8)), (torch.randn(512, 8),), policy)

    assert pipe.num_stages == 4
    with pytest.raises(SplitError, match="placement has 4 stages, but 3 were asked for"):
        auto_split(3, placement=placement)


@pytest.mark.parametrize("module", [gpt, unet])
def test_split_models_compute_the_same(module):
    model, (args, kwargs) = module.build(), module.example_inputs(2)
    before = module.build()

    pipe = pipeline(model, args, kwargs, split_policy=auto_split(3))

    assert pipe.num_stages == 3
    assert_parity(before, pipe, args, kwargs)
