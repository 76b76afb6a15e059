"""A method that loops over rows and holds no cut is one call; another number of rows fits."""

import copy

import pytest
import torch
from torch import nn

from fxpipe.errors import FxpipeError, InputError, TraceError
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


class LoopingMore(Images):
    """A loop over rows that does or reads something else, too."""

    table = None

    def __init__(self):
        super().__init__()
        self.aux = []
        self.table = torch.full((4,), 3.0)
        self.tower.eval()

    def features(self, images, lengths):
        return {"parts": [self.tower(image[:2]) * self.factor(image) for image in images]}

    def factor(self, image):
        return 1.0


class WithItsMode(LoopingMore):
    def factor(self, image):
        return 2.0 if self.training else 3.0


class WithAModeAndAParameter(LoopingMore):
    def features(self, images, lengths):
        return {"parts": [i * self.newline * (2 if self.training else 3) for i in images]}


class WithAllParameters(LoopingMore):
    def factor(self, image):
        return sum(parameter.sum() for parameter in self.parameters())


class WithTheNumberOfParts(LoopingMore):
    def factor(self, image):
        return len(list(self.modules())) + len(self._parameters)


class WithAQuestion(LoopingMore):
    def factor(self, image):
        return 2.0 if hasattr(self, "blocks") else 3.0


class WithATensor(LoopingMore):
    def factor(self, image):
        return getattr(self, "table", 1.0)


class Collecting(LoopingMore):
    def factor(self, image):
        self.aux.append(image.sum())
        return 2.0

    def forward(self, text, images, lengths):
        self.aux.clear()
        return super().forward(text, images, lengths) + sum(self.aux)


class FillingAList(LoopingMore):
    def fill(self, images, found):
        for image in images:
            found.append(self.tower(image))

    def forward(self, text, images, lengths):
        found = []
        self.fill(images, found)
        text = self.blocks[0](self.inlet(text))
        return self.blocks[1](text + torch.cat(found).sum(0))


class ReturningAnObject(LoopingMore):
    def features(self, images, lengths):
        found = super().features(images, lengths)
        found["mean"] = frozenset({round(images.mean().item(), 3)})
        return found

    def forward(self, text, images, lengths):
        text = self.blocks[0](self.inlet(text))
        found = self.features(images, lengths)
        text = text + torch.cat(found["parts"]).sum(0) * max(found["mean"])
        return self.blocks[1](text)


class ReturningNothingForSome(LoopingMore):
    def features(self, images, lengths):
        found = super().features(images, lengths)
        found["mask"] = None if images[0, 0, 0] > 0 else images * 1.0
        return found

    def forward(self, text, images, lengths):
        text = self.blocks[0](self.inlet(text))
        found = self.features(images, lengths)
        text = text + torch.cat(found["parts"]).sum(0)
        return self.blocks[1](text if found["mask"] is None else text * 3.0)


class ByValues(LoopingMore):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4)

    def features(self, images, lengths):
        towers = [self.tower if lengths[0] > 1 else self.other for _ in images]
        found = [tower(image[:2]) for tower, image in zip(towers, images, strict=True)]
        return {"parts": found}


class WithAnAttributeOfLater(LoopingMore):
    def factor(self, image):
        return getattr(self, "late", 1.0)


class WithAParameterOfLater(LoopingMore):
    def __init__(self):
        super().__init__()
        self.register_parameter("late", None)

    def factor(self, image):
        return 1.0 if self.late is None else self.late


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        WithItsMode, WithAModeAndAParameter, WithAllParameters, WithTheNumberOfParts,
        WithAQuestion, WithATensor, Collecting, FillingAList, ReturningAnObject,
        ReturningNothingForSome,
    ],
)  # fmt: skip
def test_what_it_reads_of_its_module_and_leaves_behind_is_right_or_refused(kind, training):
    torch.manual_seed(0)
    model = kind()
    model.training = training
    plain = copy.deepcopy(model)
    try:
        pipe = pipeline(model, (), inputs(2), split_spec=CUT, check=False)
    except TraceError:
        assert kind is ReturningAnObject  # a number of the images decides
        return
    assert model.aux == []

    for rows in (2, 3):
        try:
            found = run(pipe, (), inputs(rows))
        except FxpipeError:
            assert rows != 2
            continue
        assert_same(run(plain, (), inputs(rows)), found)


@pytest.mark.parametrize("kind", [WithItsMode, WithAModeAndAParameter])
def test_a_call_follows_the_mode_of_its_module(kind):
    torch.manual_seed(0)
    model = kind().eval()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)

    assert len(calls(pipe)) == 1
    for mode in (True, False):
        plain.train(mode)
        for stage in pipe.stages:
            stage.module.train(mode)
        assert_same(run(plain, (), inputs(3), seed=3), run(pipe, (), inputs(3), seed=3))


def test_a_part_that_is_read_for_other_values_only_is_refused_by_name():
    pipe = pipeline(ByValues(), (), inputs(2), split_spec=CUT)

    with pytest.raises(InputError, match=r"joined\(\) reads other of its module"):
        run(pipe, (), inputs(2, length=1))


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(4)), 2.0])
def test_an_attribute_that_comes_later_is_refused(value):
    is_parameter = isinstance(value, nn.Parameter)
    model = WithAParameterOfLater() if is_parameter else WithAnAttributeOfLater()
    pipe = pipeline(model, (), inputs(2), split_spec=CUT)
    run(pipe, (), inputs(3))
    model.late = value

    with pytest.raises(FxpipeError, match="late"):
        run(pipe, (), inputs(2))
