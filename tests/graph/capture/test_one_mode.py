"""A model that can be traced in the mode it is in is traced; the other mode refuses when used."""

import pytest
import torch
import transformers
from torch import nn

from fxpipe import SplitPoint, TraceError, pipeline
from tests.parity import assert_parity


class LayerDrop(nn.Module):
    """Skips blocks at random while it trains."""

    def __init__(self, layerdrop=0.3):
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            skip = torch.rand([]) < self.layerdrop
            if not self.training or not skip:
                x = layer(x)
        return x


class TrainsOnly(nn.Module):
    """Decides by values in evaluation, or fails."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.layers[0](x)
        if not self.training:
            if self.fault == "raises":
                raise NotImplementedError("no evaluation")
            if x.sum() > 0:
                x = -x
        return self.layers[1](x)


class Rescaled(nn.Module):
    """Changes its parameters when it changes to evaluation, as rwkv does."""

    def __init__(self):
        super().__init__()
        self.is_rescaled = False
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        if self.training == self.is_rescaled:
            with torch.no_grad():
                for layer in self.layers:
                    layer.weight.div_(2)
            self.is_rescaled = not self.training
        for layer in self.layers:
            x = layer(x)
        return x


class GroupsInTraining(nn.Module):
    """Has more queries while it trains, as rf_detr does."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(6, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        queries = self.queries if self.training else self.queries[:2]
        x = self.layers[0](x[:, None] + queries)
        return self.layers[1](x)


SPEC = {"layers.1": SplitPoint.BEGINNING}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("training", [True, False])
def test_layerdrop_evaluates_and_names_the_rate_in_training(training):
    model = LayerDrop().train(training)
    pipe = pipeline(model, (X,), split_spec=SPEC)
    model.eval()

    assert_parity(model, pipe, (X,))
    model.train()
    with pytest.raises(TraceError, match=r"set layerdrop of LayerDrop to 0"):
        pipe(X)


def test_a_rate_of_zero_trains():
    model = LayerDrop(0.0)
    pipe = pipeline(model, (X,), split_spec=SPEC)

    assert_parity(model, pipe, (X,))


@pytest.mark.parametrize("fault", ["raises", "decides"])
def test_a_model_that_only_trains_is_traced_in_training(fault):
    model = TrainsOnly(fault)
    pipe = pipeline(model, (X,), split_spec=SPEC)

    assert_parity(model, pipe, (X,))
    model.eval()
    with pytest.raises(TraceError, match=r"could not be traced in evaluation: .*"):
        pipe(X)


def test_parameters_that_one_mode_changes_are_left_alone():
    # The refusal was in the last stage, behind the changes; and no buffer had the name.
    model = Rescaled()
    pipe = pipeline(model, (X,), split_spec=SPEC)

    assert_parity(model, pipe, (X,))
    before = [parameter.clone() for parameter in model.parameters()]
    model.eval()
    for stage in pipe.stages:
        with pytest.raises(TraceError, match=r"could not be traced in evaluation: .*is_res"):
            stage.module(X)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("fault", ["raises", "decides"])
def test_the_mode_that_the_model_is_in_must_work(fault):
    with pytest.raises((TraceError, NotImplementedError), match=r"no evaluation|value of a tensor"):
        pipeline(TrainsOnly(fault).eval(), (X,), split_spec=SPEC)


@pytest.mark.parametrize("training", [True, False])
def test_a_value_of_other_sizes_in_the_other_mode_may_cross(training):
    model = GroupsInTraining().train(training)

    pipe = pipeline(model, (X,), split_spec=SPEC)

    assert_parity(pipe, model, (X,))
    assert_parity(pipe, model, (torch.randn(5, 4),))
    pipe.train(not training)
    with pytest.raises(TraceError, match=r"float32\[batch, 6, 4\] in training and float32"):
        pipe(X)


def test_wav2vec2_with_its_default_layerdrop_evaluates():
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        conv_dim=(16, 16), conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
    )  # fmt: skip
    assert config.layerdrop > 0
    model = transformers.Wav2Vec2ForCTC(config).eval()
    sound = {"input_values": torch.randn(2, 64)}
    spec = {"wav2vec2.encoder.layers.1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (), sound, split_spec=spec)

    assert_parity(model, pipe, (), sound)
    model.train()
    with pytest.raises(TraceError, match=r"set config.layerdrop of Wav2Vec2Encoder"):
        pipe(**sound)
