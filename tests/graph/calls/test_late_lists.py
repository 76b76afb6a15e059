"""Lists that are made and put together again fix no number of rows; others do."""

import pytest
import torch
from torch import nn

from fxpipe.errors import FxpipeError
from fxpipe.graph.calls.late_lists import Numbers, Parts
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import pipeline
from tests.parity import assert_same, run

CUT = {"blocks.1": SplitPoint.BEGINNING}


class Grouped(nn.Module):
    """Rows in groups, whose lengths are values of an input."""

    def __init__(self, join):
        super().__init__()
        self.join = join
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, lengths):
        x = self.blocks[0](x)
        parts = torch.split(x, lengths.tolist())
        return self.blocks[1](self.join(parts) * 2)


def inputs(*lengths):
    return {"x": torch.randn(sum(lengths), 4), "lengths": torch.tensor(lengths)}


def plainly(parts):
    return torch.cat(parts, dim=0)


def by_name(parts):
    return torch.concat(tensors=parts, dim=-2)


def from_a_holder(parts):
    return torch.cat({"parts": [parts]}["parts"][0])


def backwards(parts):
    return torch.cat(parts[::-1])


def with_one_more(parts):
    return torch.cat([*parts, parts[0]])


def with_its_length(parts):
    return torch.cat(parts) * len(parts)


def one_by_one(parts):
    return torch.cat([part + i for i, part in enumerate(parts)])


def beside_a_list(parts):
    return torch.cat([parts[0][:1], *list(parts)])


class Returning(Grouped):
    """Returns the parts beside what it does with the whole."""

    def forward(self, x, lengths):
        x = self.blocks[0](x)
        return {"parts": torch.split(x, lengths.tolist()), "y": self.blocks[1](x)}


def test_the_model_may_return_parts():
    # MiniMax M3 returns the features image by image, and looks at none; the lengths were made up
    # when nothing of the model ran any more, and a stage asked for one that it could not know.
    model = Returning(plainly)
    pipe = pipeline(model, (), inputs(2, 3), split_spec=CUT)

    for given in (inputs(2, 3), inputs(4, 1), inputs(2, 2)):
        assert_same(run(model, (), given), run(pipe, (), given))
    with pytest.raises(FxpipeError, match="lengths: expected"):
        pipe(**inputs(3, 2, 1))


@pytest.mark.parametrize("join", [plainly, by_name, from_a_holder])
def test_what_is_only_put_together_again_fits_any_number(join):
    torch.manual_seed(0)
    model = Grouped(join)
    pipe = pipeline(model, (), inputs(2, 2), split_spec=CUT)

    for kwargs in (inputs(2, 2), inputs(2, 2, 2), inputs(4), inputs(1, 3)):
        assert_same(run(model, (), kwargs), run(pipe, (), kwargs))


@pytest.mark.parametrize(
    "join", [backwards, with_one_more, with_its_length, one_by_one, beside_a_list]
)
def test_what_is_looked_at_is_right_or_refused(join):
    torch.manual_seed(0)
    model = Grouped(join)
    pipe = pipeline(model, (), inputs(2, 2), split_spec=CUT)

    for kwargs in (inputs(2, 2), inputs(2, 2, 2), inputs(4), inputs(1, 3)):
        try:
            found = run(pipe, (), kwargs)
        except FxpipeError:
            assert kwargs["lengths"].tolist() != [2, 2]
            continue
        assert_same(run(model, (), kwargs), found)


def test_lengths_that_do_not_fit_are_an_error_of_the_plain_model():
    pipe = pipeline(Grouped(plainly), (), inputs(2, 2), split_spec=CUT)

    with pytest.raises(RuntimeError, match="split_with_sizes"):
        pipe(x=torch.randn(4, 4), lengths=torch.tensor([2, 1]))


@pytest.mark.parametrize(
    "look",
    [
        list, tuple, len, sum, sorted, bool, iter, repr, reversed, lambda v: v[0], lambda v: v[:1],
        lambda v: 2 in v, lambda v: v + type(v.plain())([3]), lambda v: type(v.plain())([3]) + v,
        lambda v: v * 2, lambda v: 2 * v, lambda v: v == 1, lambda v: [*v], lambda v: max(*v),
        lambda v: v.index(2), lambda v: dict.fromkeys(v), lambda v: ",".join(map(str, v)),
        lambda v: list(zip(v, v, strict=True)), lambda v: (lambda a, b: a)(*v), hash,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Numbers, Parts])
def test_every_look_makes_the_list(kind, look):
    def make():
        return [2, 5] if kind is Numbers else (2, 5)

    late = (
        Numbers(torch.zeros(2), make) if kind is Numbers else Parts(torch.zeros(2), None, 0, make)
    )
    if look is hash and kind is Numbers:
        with pytest.raises(TypeError):
            look(late)
        return
    found, expected = look(late), look(_Plain(make()) if _needs_plain(look) else make())

    assert late._made is not None
    if look is not iter and look is not reversed:
        assert found == expected


def _needs_plain(look):
    return "plain" in getattr(getattr(look, "__code__", None), "co_names", ())


class _Plain:
    """A list with the method that the tests above use."""

    def __new__(cls, value):
        kind = type("_Plain", (type(value),), {"plain": lambda self: type(value)(self)})
        return kind(value)
