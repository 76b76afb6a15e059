"""A method that loops over rows and holds no cut is one call; another number of rows fits."""

import copy

import pytest
import torch
from torch import nn

from fxpipe.errors import FxpipeError, InputError
from fxpipe.graph.calls.method_calls import MethodCall
from fxpipe.graph.markers import SplitPoint, pipe_split
from fxpipe.graph.pipe import pipeline
from tests.parity import assert_same, run

CUT = {"blocks.1": SplitPoint.BEGINNING}


class Images(nn.Module):
    """Features of images of several sizes, and a text."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))
        self.inlet = nn.Linear(4, 4)
        self.newline = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(()))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def features(self, images, lengths):
        found = []
        for image, length in zip(images, lengths, strict=True):
            image = self.tower(image[:length])
            found.append(torch.cat([image * self.scale, self.newline[None]]))
        return {"parts": found, "count": lengths.sum()}

    def joined(self, images, lengths):
        return torch.cat(self.features(images, lengths)["parts"], dim=0)

    def forward(self, text, images, lengths):
        text = self.inlet(text)
        joined = self.joined(images, lengths)
        text = self.blocks[0](text)
        return self.blocks[1](text + joined.view(text.shape[0], -1, 4).sum(1))


class ChangingBuffer(Images):
    def features(self, images, lengths):
        self.seen.add_(1)
        return super().features(images, lengths)

    def joined(self, images, lengths):
        return super().joined(images, lengths) + self.seen


class PuttingAside(Images):
    def features(self, images, lengths):
        self.last = super().features(images, lengths)
        return self.last


class CallingABlock(Images):
    def features(self, images, lengths):
        return super().features(self.blocks[0](images), lengths)


class ChangingItsArgument(Images):
    def features(self, images, lengths):
        images.mul_(2)
        return super().features(images, lengths)

    def forward(self, text, images, lengths):
        return super().forward(text, images * 1.0, lengths)


class WithTheNumberOfImages(Images):
    def joined(self, images, lengths):
        parts = self.features(images, lengths)["parts"]
        return torch.cat(parts) * len(parts)


class CutBehindTheLoop(Images):
    def joined(self, images, lengths):
        found = self.features(images, lengths)["parts"]
        pipe_split()
        return torch.cat(found)


def inputs(rows, length=2):
    torch.manual_seed(rows)
    return {
        "text": torch.randn(rows, 4),
        "images": torch.randn(rows, 3, 4),
        "lengths": torch.full((rows,), length),
    }


def calls(pipe):
    nodes = [node for stage in pipe.stages for node in stage.module.graph.nodes]
    return [node.target.__name__ for node in nodes if isinstance(node.target, MethodCall)]


@pytest.mark.parametrize("kind", [Images, ChangingBuffer])
@pytest.mark.parametrize("training", [True, False])
def test_another_number_of_rows_fits(kind, training):
    torch.manual_seed(0)
    model = kind().train(training)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)

    assert len(calls(pipe)) == 1
    for rows in (2, 3, 1, 5):
        assert_same(run(plain, (), inputs(rows)), run(pipe, (), inputs(rows)))


def test_its_stage_has_the_parts_that_it_uses():
    model = Images()
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)

    first, second = (set(stage.module.state_dict()) for stage in pipe.stages)
    assert {"tower.0.weight", "newline"} <= first
    assert first | second == set(model.state_dict())
    assert not any(name.startswith(("tower", "newline")) for name in second)
    assert pipe.stages[0].module.tower is model.tower


def test_values_that_give_other_sizes_are_refused():
    pipe = pipeline(Images(), (), inputs(2), split_spec=CUT)

    with pytest.raises(InputError, match="a size depends on values of the inputs"):
        run(pipe, (), inputs(2, length=3))


def test_an_attribute_that_has_changed_is_refused():
    model = Images()
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)
    model.scale = 3.0

    with pytest.raises(FxpipeError, match="scale"):
        run(pipe, (), inputs(2))


def test_parameters_that_are_frozen_at_first_get_gradients_later():
    torch.manual_seed(0)
    model = Images().eval()
    model.tower.requires_grad_(False)
    model.newline.requires_grad_(False)
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)
    model.requires_grad_(True)

    assert_same(run(copy.deepcopy(model), (), inputs(3)), run(pipe, (), inputs(3)))


@pytest.mark.parametrize(
    "kind", [PuttingAside, CallingABlock, ChangingItsArgument, WithTheNumberOfImages]
)
def test_what_is_more_than_such_a_loop_is_right_or_refused(kind):
    torch.manual_seed(0)
    model = kind().eval()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (), inputs(2), split_spec={**CUT, "blocks.0": SplitPoint.BEGINNING})

    for rows in (2, 3):
        try:
            found = run(pipe, (), inputs(rows))
        except FxpipeError:
            assert rows != 2
            continue
        assert_same(run(plain, (), inputs(rows)), found)


def test_a_list_that_crosses_a_boundary_fixes_the_number_of_rows():
    torch.manual_seed(0)
    model = CutBehindTheLoop().eval()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (), inputs(2))

    assert calls(pipe) == []
    assert_same(run(plain, (), inputs(2)), run(pipe, (), inputs(2)))
    with pytest.raises(FxpipeError, match="do not fit what was traced"):
        run(pipe, (), inputs(3))


def test_a_split_by_cost_knows_the_parameters_of_its_parts():
    torch.manual_seed(0)
    model = Images().eval()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (), inputs(2), num_stages=2)

    assert set(model.state_dict()) == {n for s in pipe.stages for n in s.module.state_dict()}
    assert_same(run(plain, (), inputs(3)), run(pipe, (), inputs(3)))


def test_a_draw_in_it_comes_in_its_turn_in_training_though_traced_in_evaluation():
    torch.manual_seed(0)
    model = Images().eval()
    plain = copy.deepcopy(model).train()
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)
    for stage in pipe.stages:
        stage.module.train()

    assert_same(run(plain, (), inputs(3), seed=3), run(pipe, (), inputs(3), seed=3))
