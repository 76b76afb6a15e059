"""Functions of whole numbers that read values stay one call, and other rows are no obstacle."""

import pytest
import torch
from torch import nn

from fxpipe.errors import FxpipeError
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import pipeline
from tests.parity import assert_same, run

CUT = {"blocks.1": SplitPoint.BEGINNING}
COUNT = {"positions": 0}


def positions(grid, scale=1):
    """The row of each patch of each image, however many images there are."""
    return torch.cat([torch.arange(h).repeat_interleave(w) * scale for h, w in grid.tolist()])


def counted(grid):
    COUNT["positions"] += 1
    grid.add_(0)
    return positions(grid)


def drawn(grid):
    return positions(grid) + torch.randint(0, 1, (int(grid.prod(-1).sum()),))


class Patches(nn.Module):
    """Patches of all images in a row, with the grid of each, as vision models take them."""

    scale = 2

    def __init__(self, index=positions):
        super().__init__()
        self.index = index
        self.offset = 1
        self.table = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def rows(self, grid):
        return positions(grid, self.scale) + self.offset

    def where(self, grid):
        return positions(grid)

    def forward(self, x, grid):
        x = x + self.table(self.where(grid))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class ByMethod(Patches):
    def where(self, grid):
        return self.rows(grid)


class ByWeight(Patches):
    """What the function reads of the module is a parameter: it cannot be one call."""

    def where(self, grid):
        return self.rows(grid) + int(self.table.weight.shape[0] - 32)


class Changing(Patches):
    def where(self, grid):
        return counted(grid)


class Drawing(Patches):
    def where(self, grid):
        return drawn(grid)


def inputs(*grids, seed=0):
    grid = torch.tensor(grids)
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(int(grid.prod(-1).sum()), 8, generator=generator), "grid": grid}


@pytest.mark.parametrize("kind", [Patches, ByMethod, ByWeight])
def test_another_number_of_rows_is_computed_by_the_function_itself(kind):
    torch.manual_seed(0)
    model = kind()
    pipe = pipeline(model, (), inputs((2, 2), (2, 2)), split_spec=CUT)

    for kwargs in (inputs((2, 2), (2, 2), seed=1), inputs(*[(2, 2)] * 3), inputs((2, 2))):
        assert_same(run(model, (), kwargs), run(pipe, (), kwargs))


def test_other_values_are_followed():
    model = Patches()
    pipe = pipeline(model, (), inputs((2, 2), (2, 2)), split_spec=CUT)

    for kwargs in (inputs((1, 4), (4, 1)), inputs((2, 3), (2, 2))):
        assert_same(run(model, (), kwargs), run(pipe, (), kwargs))


def test_what_the_function_reads_of_its_module_is_compared():
    model = ByMethod()
    pipe = pipeline(model, (), inputs((2, 2), (2, 2)), split_spec=CUT)
    model.offset = 3

    with pytest.raises(FxpipeError, match="offset"):
        pipe(**inputs((2, 2), (2, 2)))


@pytest.mark.parametrize("kind", [Changing, Drawing])
def test_a_function_that_does_more_is_not_one_call(kind):
    model = kind()
    try:
        pipe = pipeline(model, (), inputs((2, 2), (2, 2)), split_spec=CUT)
    except FxpipeError:
        return
    kwargs = inputs((2, 2), (2, 2), seed=2)

    assert_same(run(model, (), kwargs), run(pipe, (), kwargs))
    assert "counted" not in pipe.stages[0].module.code
    assert "drawn" not in pipe.stages[0].module.code
