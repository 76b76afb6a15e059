"""Opened code that looks at values of the inputs: right for inputs that say the same."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from fxpipe import (
    InputError,
    PipeliningShapeError,
    SplitError,
    SplitPoint,
    TraceError,
    pipe_split,
    pipeline,
)
from tests.parity import assert_parity


def rows(count: int, width: int = 4, *, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)


class PaddingMatters(TwoParts):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.first(x)
        if padding.any():
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        pipe_split()
        return self.last(x)


@pytest.mark.parametrize("padded", [False, True])
def test_decision_by_an_input_follows_the_example(padded: bool) -> None:
    model = PaddingMatters()
    plain = copy.deepcopy(model)
    padding = torch.tensor([False, padded, False])

    pipe = pipeline(model, (rows(3), padding))

    assert_parity(plain, pipe, (rows(3), padding))
    assert_parity(plain, pipe, (rows(5, seed=1), torch.tensor([padded] + [False] * 4)))


def test_inputs_that_decide_otherwise_are_refused() -> None:
    pipe = pipeline(PaddingMatters(), (rows(3), torch.zeros(3, dtype=torch.bool)))

    with pytest.raises(InputError, match=r"if padding.any\(\):\s*gave False; these inputs give"):
        pipe(rows(3), torch.ones(3, dtype=torch.bool))


class ParameterMatters(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        pipe_split()
        return self.last(x)


def test_decision_by_an_activation_is_an_error() -> None:
    with pytest.raises(TraceError, match=r"if x.sum\(\) > 0"):
        pipeline(ParameterMatters(), (rows(3),))


class FloatMatters(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        x = self.first(x)
        pipe_split()
        return self.last(x)


def test_decision_by_a_floating_point_input_is_an_error() -> None:
    with pytest.raises(TraceError, match=r"if x.sum\(\) > 0"):
        pipeline(FloatMatters(), (rows(3),))


class KeepsSome(TwoParts):
    """The rows that are kept cross the cut; how many, the data says."""

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.first(x)[kept]
        pipe_split()
        return self.last(x)


def test_size_that_depends_on_data_grows_with_the_batch() -> None:
    model = KeepsSome()
    plain = copy.deepcopy(model)
    kept = torch.tensor([True, False, True, True])

    pipe = pipeline(model, (rows(4), kept))

    (port,) = pipe.interfaces[1].received
    assert port.port.spec.bind({"batch": 8}).shape == (6, 4)
    assert_parity(plain, pipe, (rows(4), kept))
    assert_parity(plain, pipe, (rows(8, seed=1), kept.repeat(2)))
    with pytest.raises(InputError, match=r"should be of size \[3, 4\], and is of size \[1, 4\]"):
        pipe(rows(4), torch.tensor([True, False, False, False]))


class KeepsByActivation(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x[x.sum(1) > 0]
        pipe_split()
        return self.last(x)


def test_size_that_depends_on_an_activation_is_an_error() -> None:
    # The mask was made up, and no size but zero was tried.
    with pytest.raises(SplitError, match="depends on the data"):
        pipeline(KeepsByActivation(), (rows(4),))


class KeepsByShape(TwoParts):
    def forward(self, x: Tensor, dropped: Tensor) -> Tensor:
        x = self.first(x)
        kept = torch.ones_like(x[:, 0]).bool()
        kept[dropped] = False
        x = x[kept]
        pipe_split()
        return self.last(x)


def test_mask_that_is_only_shaped_like_an_activation_has_a_value() -> None:
    model = KeepsByShape()
    plain = copy.deepcopy(model)
    dropped = torch.tensor([1])

    pipe = pipeline(model, (rows(4), dropped))

    assert_parity(plain, pipe, (rows(4), dropped))
    assert_parity(plain, pipe, (rows(4, seed=1), torch.tensor([3])))


class CountsPlaces(TwoParts):
    """As speech models do: one row of `extra` for each place that the ids leave for it."""

    def forward(self, ids: Tensor, extra: Tensor) -> Tensor:
        x = self.first(torch.stack([ids, ids, ids, ids], -1).to(extra.dtype))
        places = (ids == 7).unsqueeze(-1).expand_as(x)
        torch._check(x[places].numel() == extra.numel())
        x = x.masked_scatter(places, extra)
        pipe_split()
        return self.last(x)


def test_a_mask_expanded_like_an_activation_counts_for_the_example() -> None:
    # voxtral, audioflamingo3: the mask counted as an activation, since it takes the size of one.
    model = CountsPlaces()
    plain = copy.deepcopy(model)
    ids = torch.tensor([[1, 7, 7], [7, 2, 7]])

    pipe = pipeline(model, (ids, rows(4)))

    assert_parity(plain, pipe, (ids, rows(4)))
    more = torch.tensor([[7, 7, 3, 4], [7, 2, 7, 2], [1, 2, 7, 7]])
    assert_parity(plain, pipe, (more, rows(6, seed=1)))
    with pytest.raises(InputError, match="a size depends on values of the inputs"):
        pipe(torch.tensor([[1, 2, 7], [7, 2, 7]]), rows(4))


class Packed(nn.Module):
    """Not opened: works on segments whose lengths are data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.split(x, lengths.tolist())
        return torch.cat([self.linear(part).sum(0, keepdim=True) for part in parts])


class Segments(TwoParts):
    def __init__(self) -> None:
        super().__init__()
        self.packed = Packed()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.packed(self.first(x), lengths * 1)
        pipe_split()
        return self.last(x)


def test_leaf_that_needs_values_gets_those_of_the_example() -> None:
    model = Segments()
    plain = copy.deepcopy(model)
    lengths = torch.tensor([3, 4])

    pipe = pipeline(model, (rows(7), lengths))

    assert_parity(plain, pipe, (rows(7), lengths))
    assert_parity(plain, pipe, (rows(7, seed=1), torch.tensor([2, 5])))


class Counts(TwoParts):
    """`.tolist()`, a tensor made of tensors, and an index made of tensors."""

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        starts = [torch.argmax(row) for row in marks]
        offsets = torch.tensor(starts, dtype=x.dtype)
        steps = sum(marks[0].tolist())
        table = torch.zeros(4, 4, dtype=x.dtype)
        table[starts, [torch.zeros_like(start) for start in starts]] = 1.0
        x = self.first(x) @ table + offsets.mean()
        pipe_split()
        for _ in range(steps):
            x = torch.tanh(self.last(x))
        return x


def test_numbers_from_inputs_become_part_of_the_graph() -> None:
    model = Counts()
    plain = copy.deepcopy(model)
    marks = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])

    pipe = pipeline(model, (rows(3), marks))

    assert_parity(plain, pipe, (rows(3), marks))
    assert_parity(plain, pipe, (rows(3, seed=1), torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])))
    with pytest.raises(InputError, match="would do something else"):
        pipe(rows(3), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1]]))


class Crowded(nn.Module):
    """Needs values, and takes two sizes that may each grow, but not both at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        assert a.shape[1] + b.shape[1] < 20, "too crowded"
        steps = int(a.sum() * 0) + 1
        for _ in range(steps):
            x = self.linear(x)
        return torch.cat([x, x.new_zeros(a.shape[1] + b.shape[1], 4)])


class Room(TwoParts):
    def __init__(self) -> None:
        super().__init__()
        self.crowded = Crowded()

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = self.crowded(self.first(x), a, b)
        pipe_split()
        return self.last(x)


def test_sizes_of_a_leaf_on_real_tensors_are_never_guessed() -> None:
    # All sizes used to be taken for plain numbers then, while the inputs stayed open.
    model = Room()
    plain = copy.deepcopy(model)
    inputs = (rows(3), rows(3, 5), rows(3, 6))

    pipe = pipeline(model, inputs)

    assert_parity(plain, pipe, inputs)
    assert_parity(plain, pipe, (rows(7), rows(7, 5), rows(7, 6)))


class Reflected(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        fixed = x.detach() ** 2 + 1
        x = 2**x + 3 / (x * x + 1) + (5 - x) + 7 // fixed + 2 % fixed
        pipe_split()
        return self.last(x)


def test_operators_with_a_number_on_the_left() -> None:
    # `2**x` was written under the name of another function, which does not exist.
    model = Reflected()
    plain = copy.deepcopy(model)

    assert_parity(plain, pipeline(model, (rows(3),)), (rows(3),))


class AsksForEmptiness(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if all(x.shape):
            x = nn.functional.pad(x, (0, 0, 1, 0))
        pipe_split()
        return self.last(x)


def test_asking_whether_a_size_is_zero_does_not_fix_it() -> None:
    # `if size` counted as asking for the number, and pad insisted on all sizes.
    model = AsksForEmptiness()
    plain = copy.deepcopy(model)

    pipe = pipeline(model, (rows(3),))

    assert_parity(plain, pipe, (rows(5, seed=1),))


class CropsByAnInput(TwoParts):
    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([row[..., : size[0] // 2, :] for row, size in zip(x, sizes, strict=True)])
        pipe_split()
        return self.last(x)


def test_the_end_of_a_slice_follows_the_example() -> None:
    # Pixtral crops each image so. The tensor was not found inside of the slice, and the
    # example's value never computed.
    model = CropsByAnInput()
    plain = copy.deepcopy(model)
    sizes = torch.tensor([[4], [6]])

    pipe = pipeline(model, (rows(12).view(2, 6, 4), sizes))

    assert_parity(plain, pipe, (rows(12, seed=1).view(2, 6, 4), sizes))
    with pytest.raises(InputError, match="size"):
        pipe(rows(12).view(2, 6, 4), torch.tensor([[2], [6]]))


class Checked(nn.Module):
    """Checks its inputs with torch, and says in a message, or in a name, how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.words: dict[str, float] = {"rows of 3": 2.0}

    def forward(self, x: torch.Tensor, ids: torch.Tensor, named: bool = False) -> torch.Tensor:
        rows = ids.shape[0]
        torch._check_tensor_all(ids.sum() == 6 * rows, lambda: "the ids do not add up")
        torch._assert(x.dim() == 2, f"two dimensions were expected, not {x.shape}")
        warnings.warn(f"a model of {rows} rows", stacklevel=1)
        factor = self.words[f"rows of {rows}"] if named else 1.0
        return self.b(self.a(x) * factor)


@pytest.mark.filterwarnings("ignore:a model of")
def test_a_check_of_values_is_one_of_the_stage() -> None:
    # It was dropped: a stage ran where the model fails.
    x, ids = torch.randn(3, 4), torch.tensor([[1, 2, 3]] * 3)
    model = Checked()
    pipe = pipeline(model, (x, ids), split_spec={"b": SplitPoint.BEGINNING})

    torch.testing.assert_close(pipe(x[:2], ids[:2]), model(x[:2], ids[:2]))
    with pytest.raises(InputError, match=r"finds them wrong:\n.*_check_tensor_all"):
        pipe(x, ids + 1)


@pytest.mark.filterwarnings("ignore:a model of")
def test_a_size_in_a_text_decides_unless_it_is_a_message() -> None:
    x, ids = torch.randn(3, 4), torch.tensor([[1, 2, 3]] * 3)

    pipe = pipeline(Checked(), (x, ids, True), split_spec={"b": SplitPoint.BEGINNING})

    with pytest.raises(PipeliningShapeError, match=r"expected float32\[3, "):
        pipe(x[:2], ids[:2], True)
