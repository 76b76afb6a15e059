"""Builtins that opened code calls leave sizes open where they can."""

import pytest
import torch
from torch import nn

from fxpipe import PipeliningShapeError, SplitPoint, pipeline
from tests.parity import assert_same, run

CUT = {"blocks.1": SplitPoint.BEGINNING}


class Chunks(nn.Module):
    """Goes over the length in chunks of eight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        parts = [self.blocks[0](x[:, start : start + 8]) for start in self.starts(x.shape[1])]
        return self.blocks[1](torch.cat(parts, dim=1))

    def starts(self, length):
        return range(0, length, 8)


class Backwards(Chunks):
    def starts(self, length):
        return range(length - 8, -8, -8)


class Tokens(Chunks):
    def starts(self, length):
        found = range(length)
        assert isinstance(found, range)
        return found[::8]


@pytest.mark.parametrize("kind", [Chunks, Backwards, Tokens])
def test_a_loop_over_chunks_is_what_the_model_does_or_is_refused(kind):
    model = kind()
    pipe = pipeline(model, (torch.randn(2, 12, 4),), split_spec=CUT, check=False)

    for length in (12, 8, 9, 16, 17, 24, 4):
        x = torch.randn(2, length, 4)
        try:
            found = run(pipe, (x,), {})
        except PipeliningShapeError:
            assert kind is not Chunks or length not in (9, 12, 16)
        else:
            assert_same(run(model, (x,), {}), found)


def test_the_number_of_chunks_is_what_is_fixed():
    # Nemotron 3.5 hears a sound in chunks; the first `range` over its length fixed that.
    pipe = pipeline(Chunks(), (torch.randn(2, 12, 4),), split_spec=CUT)

    with pytest.raises(PipeliningShapeError, match="traced for sizes with"):
        pipe(torch.randn(2, 8, 4))
