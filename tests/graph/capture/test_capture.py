"""What a trace refuses, and the words it uses; what it asks of later sizes."""

import pathlib

import pytest
import torch
from torch import Tensor, nn

from fxpipe import PipeliningShapeError, SplitPoint, TraceError, pipe_split, pipeline

X = torch.randn(4, 8)
FILE = pathlib.Path(__file__).name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.a(x))
        pipe_split()
        return self.b(x)

    def middle(self, x: Tensor) -> Tensor:
        return x


class NotFinite(Net):
    def middle(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        return x


def test_a_check_of_values_is_a_trace_error_with_the_line() -> None:
    with pytest.raises(TraceError) as caught:
        pipeline(NotFinite(), (X,))

    assert FILE in str(caught.value)
    assert "if not torch.isfinite(x).all():" in str(caught.value)


class Raises(Net):
    def middle(self, x: Tensor) -> Tensor:
        if x.shape[1] == 8:
            raise KeyError("mine")
        return x


class Misfit(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x @ torch.ones(5, 5)


@pytest.mark.parametrize(
    ("model", "kind", "line"),
    [
        (Raises(), KeyError, 'raise KeyError("mine")'),
        (Misfit(), RuntimeError, "return x @ torch.ones(5, 5)"),
    ],
)
def test_an_error_of_the_model_keeps_its_type_and_gains_the_line(
    model: nn.Module, kind: type[Exception], line: str
) -> None:
    flags = [(part, dict(vars(part))) for part in model.modules()]

    with pytest.raises(kind) as caught:
        pipeline(model, (X,))

    (note,) = caught.value.__notes__
    assert FILE in note
    assert line in note
    assert all(vars(part) == before for part, before in flags)


class Memory:
    """An object that a leaf may write to, so that its sizes are followed as symbols."""

    def __init__(self) -> None:
        self.last: Tensor | None = None


class Truncates(nn.Module):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        if x.shape[1] > 1:
            memory.last = x
        return x[:, :16] if x.shape[1] > 16 else x


class WithLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.b = Truncates(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        memory = Memory()
        x = self.cut(x, memory)
        return self.b(x) + memory.last.mean()


def test_a_size_that_a_leaf_decides_by_is_checked() -> None:
    model = WithLeaf()
    pipe = pipeline(model, (torch.randn(2, 8, 8),), split_spec={"b": SplitPoint.BEGINNING})

    assert pipe.info().symbols == ("batch", "sequence")
    x = torch.randn(3, 16, 8)
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(PipeliningShapeError, match="sequence <= 16; got sequence = 17"):
        pipe(torch.randn(3, 17, 8))


def test_whether_a_size_is_one_is_no_condition_of_a_leaf() -> None:
    pipe = pipeline(WithLeaf(), (torch.randn(2, 8, 8),), split_spec={"b": SplitPoint.BEGINNING})

    assert [str(condition) for condition in pipe.info().guards] == ["sequence <= 16"]


class Noisy(WithLeaf):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=None, dtype=x.dtype))


def test_a_draw_without_a_generator_fixes_no_size() -> None:
    # torch takes no symbols in the variant of randn that has a generator.
    pipe = pipeline(Noisy(), (torch.randn(2, 8, 8),), split_spec={"b": SplitPoint.BEGINNING})

    assert pipe.info().symbols[:1] == ("batch",)
