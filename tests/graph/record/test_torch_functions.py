import pytest
import torch
from torch import nn

from fxpipe import SplitPoint, pipeline
from tests.parity import assert_same, run


class Recurrent(nn.Module):
    """A recurrent layer as a leaf, in front of a cut."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        width = layer.hidden_size * (2 if layer.bidirectional else 1)
        self.layer, self.last = layer, nn.Linear(width, 3)

    def forward(self, x, hidden=None):
        found, hidden = self.layer(x, hidden)
        return self.last(found), hidden


class Filled(nn.Module):
    """Image features in the place of some tokens, as multimodal models have it."""

    def __init__(self, is_function: bool) -> None:
        super().__init__()
        self.tokens, self.images, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.is_function = is_function

    def forward(self, ids, images):
        x, mask, features = self.tokens(ids), (ids == 0)[..., None], self.images(images)
        if self.is_function:
            return self.last(torch.masked_scatter(x, mask, features))
        return self.last(x.masked_scatter(mask, features))


@pytest.mark.parametrize("is_batch_first", [False, True])
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers_leave_rows_and_steps_open(kind, is_bidirectional, is_batch_first):
    # torch's code for tensors without data goes through the sequence step by step, and a GRU
    # fixed both the number of steps and of rows.
    layer = kind(4, 6, 2, bidirectional=is_bidirectional, batch_first=is_batch_first)
    model = Recurrent(layer)
    pipe = pipeline(model, (torch.randn(2, 5, 4),), split_spec={"last": SplitPoint.BEGINNING})

    for rows, steps in ((2, 5), (3, 7), (1, 4)):
        x = torch.randn(rows, steps, 4)

        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))


def test_recurrent_layers_may_be_given_a_state_or_no_batch():
    model = Recurrent(nn.GRU(4, 6))
    call = (torch.randn(5, 4, requires_grad=True), torch.randn(1, 6, requires_grad=True))
    pipe = pipeline(model, call, split_spec={"last": SplitPoint.BEGINNING})

    assert_same(run(model, call, {}), run(pipe, call, {}))


@pytest.mark.parametrize("is_function", [False, True])
def test_masked_scatter_leaves_rows_and_tokens_open(is_function):
    # torch's C++ code takes no symbol here, so all sizes of every model that mixes text and
    # images were fixed.
    def call(rows: int, length: int):
        ids = torch.randint(1, 9, (rows, length))
        ids[:, :2] = 0
        return ids, torch.randn(rows, 2, 4)

    model = Filled(is_function)
    pipe = pipeline(model, call(2, 5), split_spec={"last": SplitPoint.BEGINNING})

    for rows, length in ((2, 5), (3, 7), (1, 4)):
        inputs = call(rows, length)
        assert_same(run(model, inputs, {}), run(pipe, inputs, {}))
