"""What a leaf decides by sizes is no condition on the model's inputs; what it needs is one."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpipe import InputError, Pipe, PipeliningShapeError, SplitPoint, pipeline
from tests.parity import assert_same, run

WIDTH = 4


class Tokens(nn.Module):
    """Goes through the tokens one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for index in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, index]) + state)
            found.append(state)
        return torch.stack(found, 1)


class Chunks(Tokens):
    """Pads the tokens to whole chunks, and goes through these."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        padded = functional.pad(x, (0, 0, 0, -length % 4))
        chunks = padded.reshape(len(x), -1, 4, WIDTH)
        if chunks.shape[1] == 1:
            chunks = chunks * 2.0
        return self.linear(chunks.cumsum(1)).flatten(1, 2)[:, :length]


class Asks(Tokens):
    """Goes through the rows and the tokens, and then asks for a value."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [super(Asks, self).forward(row[None]) for row in x]
        return torch.cat(rows) if x.sum().item() < 1e6 else x


class Branches(Tokens):
    """Returns another size than it is given, of long inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if x.shape[1] < 20 else x[:, ::2])


class Recurrent(nn.Module):
    """An LSTM: on tensors without data torch makes numbers of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x)[0]
        return found


class Joint(nn.Module):
    """Adds each token to each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None] + x[:, :, None]


class Even(Tokens):
    """Takes pairs only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unflatten(1, (-1, 2)).sum(2))


class Windows(nn.Module):
    """Attends in windows of a picture, whose sides come as numbers beside the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        side = min(4, height, width)
        missing = [(side - size % side) % side for size in (height, width)]
        x = functional.pad(x.view(len(x), height, width, -1), (0, 0, 0, missing[1], 0, missing[0]))
        rows, columns = x.shape[1] // side, x.shape[2] // side
        windows = x.view(len(x), rows, side, columns, side, WIDTH).transpose(2, 3)
        windows = self.linear(windows.flatten(3, 4).cumsum(3)).view(-1, side, side, WIDTH)
        x = windows.view(-1, rows, columns, side, side, WIDTH).transpose(2, 3)
        x = x.reshape(len(x), rows * side, columns * side, WIDTH)
        if missing[0] > 0 or missing[1] > 0:
            x = x[:, :height, :width]
        return x.reshape(len(x), height * width, WIDTH)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Windows() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = x + block(x, height, width)
        return x


class Model(nn.Module):
    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.a, self.leaf, self.b = nn.Linear(WIDTH, WIDTH), leaf, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.leaf(self.a(x)))


def split(leaf: nn.Module, at: str) -> tuple[Model, Pipe]:
    torch.manual_seed(0)
    model = Model(leaf)
    return model, pipeline(
        model, (torch.randn(2, 8, WIDTH),), split_spec={at: SplitPoint.BEGINNING}
    )


@pytest.mark.parametrize("at", ["leaf", "b"])
@pytest.mark.parametrize("kind", [Tokens, Chunks, Asks])
def test_a_leaf_that_decides_by_sizes_takes_others(kind: type[Tokens], at: str) -> None:
    model, pipe = split(kind(), at)

    for shape in ((2, 8), (3, 8), (1, 8), (2, 4), (2, 11), (5, 16), (1, 1)):
        x = torch.randn(*shape, WIDTH)
        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))
    assert [str(sent.port.spec) for sent in pipe.interfaces[0].sent] == [
        "float32[batch, sequence, 4]"
    ]


@pytest.mark.parametrize("at", ["leaf", "b"])
def test_a_leaf_that_returns_other_sizes_is_refused(at: str) -> None:
    model, pipe = split(Branches(), at)
    x = torch.randn(2, 24, WIDTH)

    with pytest.raises((InputError, PipeliningShapeError)):
        pipe(x)
    torch.testing.assert_close(pipe(x[:, :11]), model(x[:, :11]))


def test_sizes_that_were_numbers_in_the_leaf_are_open_behind_it() -> None:
    # The output kept the numbers, so that the next leaf took them for conditions of its own.
    model = Model(Recurrent())
    model.b = Joint()
    model.double()
    x = torch.randn(2, 8, WIDTH).double()
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING})

    for shape in ((2, 8), (3, 8), (1, 8), (2, 11)):
        x = torch.randn(*shape, WIDTH).double()
        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))
    assert [str(sent.port.spec) for sent in pipe.interfaces[0].sent] == [
        "float64[batch, sequence, 4]"
    ]


def test_what_a_leaf_needs_is_a_condition_of_the_model() -> None:
    model, pipe = split(Even(), "b")

    x = torch.randn(2, 12, WIDTH)
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(PipeliningShapeError, match="the model was traced for sizes with"):
        pipe(x[:, :7])


def test_a_leaf_that_is_given_sizes_as_numbers_takes_others() -> None:
    # Sides that are padded to whole windows grew with each block: Swin took two minutes.
    torch.manual_seed(0)
    model = Picture().double()
    x = torch.randn(2, 16, 20, WIDTH).double()
    pipe = pipeline(model, (x,), split_spec={"blocks.2": SplitPoint.BEGINNING})

    for shape in ((3, 16, 20), (1, 16, 20), (2, 24, 32), (1, 32, 18), (2, 10, 26)):
        x = torch.randn(*shape, WIDTH).double()
        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))


class Measures(nn.Module):
    """Returns what it has computed of sizes, some of them given as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, length: int) -> tuple[Tensor, float, bool, int]:
        return self.linear(x), x.shape[1] / 2, length > 5, length * 3


class Measured(nn.Module):
    def __init__(self, given: bool) -> None:
        super().__init__()
        self.leaf, self.b, self.given = Measures(), nn.Linear(WIDTH, WIDTH), given

    def forward(self, x: Tensor) -> Tensor:
        x, half, is_long, triple = self.leaf(x, x.shape[1] if self.given else 8)
        x = x * half + triple
        return self.b(x + 1 if is_long else x)


@pytest.mark.parametrize("given", [True, False])
def test_fractions_and_answers_that_a_leaf_returns_are_of_the_models_sizes(given: bool) -> None:
    # "stage 0 needs the size s53", a symbol of ours that nobody has.
    torch.manual_seed(0)
    model = Measured(given)
    pipe = pipeline(model, (torch.randn(2, 8, WIDTH),), split_spec={"b": SplitPoint.BEGINNING})

    for shape in ((2, 8), (3, 11), (1, 6)):
        x = torch.randn(*shape, WIDTH)
        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))
    if given:
        with pytest.raises(PipeliningShapeError, match="sequence > 5"):
            pipe(torch.randn(2, 4, WIDTH))
