"""A question about one row is no condition where its answer changes nothing."""

import pytest
import torch
from torch import Tensor, nn

from fxpipe import PipeliningShapeError, SplitPoint, pipeline
from tests.parity import assert_same, run


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, x: Tensor) -> Tensor:
        noise = torch.ones(x.shape[0], 4, dtype=x.dtype)
        if x.shape[0] > 1 and noise.shape[0] == 1:
            noise = noise.repeat(x.shape[0], 1)
        return x + noise


class Doubles(Asks):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x


class Reads(Asks):
    """Asks for an attribute where there is one row."""

    def between(self, x: Tensor) -> Tensor:
        return x * 5 if x.shape[0] == 1 and self.factor > 3 else x


class Trains(Asks):
    """Is the same for one row in evaluation only."""

    def between(self, x: Tensor) -> Tensor:
        return x * 5 if x.shape[0] == 1 and self.training else x


class Widens(Asks):
    """Repeats one row: the operations are the same, the sizes are not."""

    def between(self, x: Tensor) -> Tensor:
        return x.expand(2 if x.shape[0] == 1 else x.shape[0], 4)


class Stretches(Asks):
    """Repeats one row as often as there are rows; there is no need if it is the only one."""

    def between(self, x: Tensor) -> Tensor:
        bias = self.a(torch.ones(x.shape[0], 4, dtype=x.dtype))
        if bias.shape[0] == 1:
            bias = bias.repeat(x.shape[0], 1)
        return x + bias


class StretchesOnce(Asks):
    """Changes what it has repeated, which for one row is a copy and else the tensor itself."""

    def between(self, x: Tensor) -> Tensor:
        y = x * 1
        z = y.repeat(x.shape[0], 1) if x.shape[0] == 1 else y
        z += 1
        return y + z


def split(model: nn.Module) -> nn.Module:
    x = torch.randn(2, 4)
    return pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING}, check=False)


@pytest.mark.parametrize("kind", [Asks, Stretches])
def test_one_row_is_taken_where_the_model_does_the_same(kind: type[Asks]) -> None:
    # univnet asks so in front of a broadcast; microbatches of one row were refused.
    # sam_hq repeats the rows of a feature if it has one, which for one row in all does nothing.
    model = kind()
    pipe = split(model)

    for rows in (1, 2, 3):
        x = torch.randn(rows, 4)
        assert_same(run(model, (x,), {}), run(pipe, (x,), {}))


@pytest.mark.parametrize("kind", [Doubles, Trains, Widens, StretchesOnce])
def test_one_row_is_refused_where_the_model_does_something_else(kind: type[Asks]) -> None:
    model = kind()
    pipe = split(model)

    with pytest.raises(PipeliningShapeError, match="traced for sizes with batch != 1"):
        pipe(torch.randn(1, 4))
    x = torch.randn(3, 4)
    assert_same(run(model, (x,), {}), run(pipe, (x,), {}))


def test_what_is_read_for_one_row_is_guarded() -> None:
    model = Reads()
    pipe = split(model)

    x = torch.randn(1, 4)
    assert_same(run(model, (x,), {}), run(pipe, (x,), {}))
    model.factor = 4.0
    with pytest.raises(Exception, match="factor"):
        pipe(x)
