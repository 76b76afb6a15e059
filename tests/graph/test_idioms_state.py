"""Idioms that keep state or look at values: equal to the plain model, or an error of ours.

Each program runs beside the plain model through what a training script does. Where the pipe
refuses, the error must be ours, and one about split code must name a line of this file.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpipe import SplitPoint, pipeline
from fxpipe.errors import FxpipeError, TraceError
from tests.parity import assert_same, run

WIDTH = 8


class Program(nn.Module):
    """Two layers, cut between them."""

    changes: tuple[Callable[[Any], None], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inputs(self, rows: int, length: int) -> tuple[Any, ...]:
        return (torch.randn(rows, length, WIDTH),)


class StateFromNone(Program):
    state: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros(WIDTH) if self.state is None else self.state
        y = self.a(x) + state
        self.state = y.detach().mean((0, 1))
        return self.b(y)


class BufferFromNone(Program):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.mean is None:
            self.mean = y.detach().mean((0, 1))
        return self.b(y) + self.mean


class BufferMadeInForward(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean = self.mean * 0.9 + y.detach().mean((0, 1)) * 0.1
        return self.b(y + self.mean)


class Counter(Program):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.b(self.a(x) / self.calls)


class History(Program):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        self.history.append(y.detach().mean())
        return self.b(y)


class DataAssigned(Program):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        self.mean.data = 0.9 * self.mean.data + 0.1 * y.detach().mean((0, 1))
        return self.b(y + self.mean)


class DataChanged(DataAssigned):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        self.mean.data.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        return self.b(y + self.mean)


class ChangesInput(Program):
    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        return self.b(self.a(x)) + x


class ChangesReceived(Program):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(self.relu(y)) + y


class Item(Program):
    def forward(self, x: Tensor, count: Tensor) -> Any:
        return self.b(self.a(x)[:, : count.item()])

    def inputs(self, rows: int, length: int) -> tuple[Any, ...]:
        return torch.randn(rows, length, WIDTH), torch.tensor(min(2, length))


class Lengths(Program):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        y = self.a(x)
        rows = [row[:count].mean(0) for row, count in zip(y, lengths.tolist(), strict=True)]
        return self.b(torch.stack(rows))

    def inputs(self, rows: int, length: int) -> tuple[Any, ...]:
        return torch.randn(rows, length, WIDTH), torch.arange(rows) % length + 1


class Chosen(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y if y.sum() > 0 else -y)


class Doubles(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class OwnCall(Program):
    def __init__(self) -> None:
        super().__init__()
        self.doubles = Doubles(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.doubles(self.a(x)))


def replace_forward(model: Any) -> None:
    known = model.b.forward
    model.b.forward = lambda input: known(input) * 3


class ForwardReplaced(Program):
    changes = (replace_forward,)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


class OwnForward(Program):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other

    def other(self, x: Tensor) -> Any:
        return self.b(self.a(x))


def choose_other(model: Any) -> None:
    model.choice = "tanh"


class Choice(Program):
    changes = (choose_other,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh()})
        self.choice = "linear"

    def forward(self, x: Tensor) -> Any:
        return self.b(self.layers[self.choice](self.a(x)))


def set_hidden(model: Any) -> None:
    model._scale = 3.0


class Property(Program):
    changes = (set_hidden,)

    def __init__(self) -> None:
        super().__init__()
        self._scale = 2.0

    @property
    def scale(self) -> float:
        return self._scale

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x) * self.scale)


class DropPath(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.training:
            y = y * torch.empty(x.shape[0], 1, 1).bernoulli_(0.7) / 0.7
        return self.b(y)


class LayerDrop(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if not self.training or torch.rand(()) > 0.5:
            y = y * 2
        return self.b(y)


class Checkpointed(Program):
    def half(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x).relu(), 0.2, self.training)

    def forward(self, x: Tensor) -> Any:
        return self.b(checkpoint(self.half, x, use_reentrant=False))


class Chunks(Program):
    def forward(self, x: Tensor) -> Any:
        return self.b(torch.cat([self.a(part) for part in x.split(2, dim=1)], 1))


def to_double(model: Any) -> None:
    model.double()


class Follows(Program):
    """Casts its input to the dtype that its weights have."""

    changes = (to_double,)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x.to(self.a.weight.dtype)))


class InnerGradient(Program):
    def forward(self, x: Tensor) -> Any:
        return self.b(torch.func.grad(lambda y: y.square().sum())(self.a(x)))


class Seeded(Program):
    def forward(self, x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)
        return self.b(self.a(x) + torch.randn(WIDTH, generator=generator))


PROGRAMS = (*Program.__subclasses__(), DataChanged)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_equal_or_refused(kind: type[Program]) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    if kind is OwnForward:  # the copy's forward is the model's
        plain = kind()
        plain.load_state_dict(model.state_dict())
    try:
        pipe = pipeline(model, model.inputs(4, 6), split_spec={"b": SplitPoint.BEGINNING})
    except FxpipeError as error:
        assert not isinstance(error, TraceError) or __file__ in str(error)
        return

    for shape in ((4, 6), (4, 6), (3, 6), (1, 6), (4, 9), (2, 2)):
        compare(plain, pipe, model.inputs(*shape))
    for training in (False, True):
        for part in (plain, *(stage.module for stage in pipe.stages)):
            part.train(training)
        compare(plain, pipe, model.inputs(4, 6))
    for one in (model, plain):
        one.load_state_dict(copy.deepcopy(one.state_dict()), assign=True)
    compare(plain, pipe, model.inputs(4, 6))
    for change in kind.changes:
        change(model)
        change(plain)
        compare(plain, pipe, model.inputs(4, 6))


def compare(plain: nn.Module, pipe: Any, args: tuple[Any, ...]) -> None:
    kept = copy.deepcopy(plain.__dict__.get("_buffers"))
    expected = run(plain, args)
    drawn = torch.get_rng_state()
    try:
        found = run(pipe, args)
    except FxpipeError:
        plain.__dict__["_buffers"] = kept  # neither has made this call
        return
    assert_same(expected, found)
    assert torch.equal(drawn, torch.get_rng_state())
