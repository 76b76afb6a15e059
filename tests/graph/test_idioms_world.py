"""What code leaves behind, asks of the world, or does by mode: equal, or refused by name.

Each class is an idiom that was once silently different, or refused for a reason that was not true.
"""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe import SplitPoint, pipe_split, pipeline
from fxpipe.errors import FxpipeError, SplitError, TraceError
from tests.parity import assert_same, run

WIDTH = 8


class Program(nn.Module):
    """Two layers, cut between them, or wherever num_stages wants."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


class FrozenBeside(Program):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.a(x).flatten(0, 1))
        factor = 2 if self.norm.training else 3
        return self.b(y * factor).view(x.shape) * factor


class GradientsByMode(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        with torch.set_grad_enabled(self.training):
            z = self.b(y)
        return z + y


class Average(Program):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.mean((0, 1)), 0.1)
        return self.b(y - self.mean)


class LeavesLists(Program):
    losses: list[Tensor]

    def forward(self, x: Tensor) -> Any:
        self.losses, self.sizes = [], {"rows": x.shape[0]}
        y = self.a(x)
        self.losses.append(y.square().mean())
        z = self.b(y)
        self.losses.append(z.abs().mean())
        self.hidden, self.length, self.kind = (y, z), x.shape[1], "sequence"
        return z, torch.stack(self.losses).sum()


class ClearsLists(Program):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.losses.clear()
        y = self.a(x)
        self.losses.append(y.square().mean())
        return self.b(y) + sum(self.losses)


class Cached(Program):
    @functools.cached_property
    def scale(self) -> float:
        return float(self.a.in_features) ** -0.5

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(WIDTH).float()

    @functools.cached_property
    def layers(self) -> list[nn.Module]:
        return [self.a, self.b]

    def forward(self, x: Tensor) -> Any:
        return self.layers[1](self.layers[0](x) * self.scale + self.table)


class GrowingTable(Program):
    def __init__(self) -> None:
        super().__init__()
        self.cos: Tensor | None = None
        self.longest = 0

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.cos is None or x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.cos = torch.arange(self.longest).float()[:, None].cos()
        return self.b(y * self.cos[: x.shape[1]])


class Selects(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        return y[y.sum(-1) > 0].sum(0)


EQUAL: tuple[type[Program], ...] = (
    FrozenBeside, GradientsByMode, Average, LeavesLists, ClearsLists, Cached, GrowingTable, Selects,
)  # fmt: skip


def split(model: nn.Module, how: str, x: Tensor, **options: Any) -> Any:
    where: dict[str, Any] = {"split_spec": {"b": SplitPoint.BEGINNING}}
    return pipeline(model, (x,), **(where if how == "spec" else {"num_stages": 2}), **options)


def kept(model: nn.Module) -> dict[str, Any]:
    """What a module holds besides its parts, with tensors as numbers."""
    return {
        key: _plain(value)
        for key, value in vars(model).items()
        if not key.startswith("_") and key not in ("training", "layers")
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [round(float(number), 4) for number in value.detach().flatten()]
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


@pytest.mark.parametrize("how", ["spec", "num_stages"])
@pytest.mark.parametrize("kind", EQUAL, ids=lambda kind: kind.__name__)
def test_stages_do_and_leave_what_the_model_does(kind: type[Program], how: str) -> None:
    if kind is Average and how == "spec":
        how = "num_stages"  # two stages cannot share the buffer
    torch.manual_seed(0)
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 5, WIDTH, requires_grad=True)
    before, random_state = kept(model), torch.get_rng_state()

    pipe = split(model, how, x, check=False)

    assert kept(model) == before  # no fake tensor stays
    assert torch.equal(torch.get_rng_state(), random_state)
    for training in (True, False):
        for part in (plain, model, *(stage.module for stage in pipe.stages)):
            part.train(training)
        for rows in (4, 2):
            x = torch.randn(rows, 5, WIDTH, requires_grad=True)
            assert_same(run(plain, (x,)), run(pipe, (x,)))
            assert kept(model) == kept(plain)


def test_the_check_takes_a_list_that_each_run_fills_again() -> None:
    pipe = split(LeavesLists(), "spec", torch.randn(4, 5, WIDTH))

    assert pipe.info().check.is_checked


def test_a_flag_of_a_module_in_another_stage_is_followed() -> None:
    # The number that the flag chooses was sent as the constant that it was in training.
    model = FrozenBeside()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 5, WIDTH, requires_grad=True)
    pipe = split(model, "spec", x, check=False)

    for part in (plain, model):
        part.norm.eval()

    assert_same(run(plain, (x,)), run(pipe, (x,)))


class Softmaxes(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x.to(self.a.weight.dtype))
        return self.b(y.float().softmax(-1).to(y.dtype))


def test_a_dtype_of_a_value_in_another_stage_follows_the_model() -> None:
    # It was sent as the constant that it was in the trace, and the layer behind it failed.
    model = Softmaxes()
    x = torch.randn(4, 5, WIDTH, requires_grad=True)
    pipe = split(model, "num_stages", x, check=False)

    model.double()

    torch.testing.assert_close(pipe(x), model(x))


def test_a_dtype_of_a_value_in_another_stage_is_that_of_the_value() -> None:
    # It was read off a module of the stage: under autocast the output was float32, not bfloat16.
    model = Limits()
    x = torch.randn(4, 5, WIDTH)
    pipe = split(model, "num_stages", x, check=False)

    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(pipe(x), model(x))


class Limits(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        least = torch.full((x.shape[1], 1), torch.finfo(y.dtype).min, dtype=y.dtype)
        return self.b(y.masked_fill(y > 0, 0.0)) + least.clamp(min=-1)


class Extends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: dict[str, Tensor]) -> Any:
        values["hidden"] = self.a(values["x"])
        return self.b(values["hidden"])


def test_an_input_that_code_puts_things_into_is_refused() -> None:
    # The pipe refused its own example, since "its structure differs from the traced call's".
    with pytest.raises(TraceError, match="changes what is in its input 'values', a dict"):
        pipeline(Extends(), ({"x": torch.randn(4, WIDTH)},), num_stages=2)


class ByLength(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        return y.squeeze(1) if x.shape[1] == 1 else y.mean(1)


@pytest.mark.parametrize("rows", [1, 4])
def test_an_example_of_one_token_is_taken(rows: int) -> None:
    # A size of 1 is traced as 2; the condition `sequence != 1` then refused the example itself.
    model = ByLength()
    x = torch.randn(rows, 1, WIDTH)

    pipe = split(model, "spec", x)

    torch.testing.assert_close(pipe(x), model(x))
    torch.testing.assert_close(pipe(x.repeat(3, 1, 1)), model(x.repeat(3, 1, 1)))


class Environment(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y * 2 if os.environ.get("FXPIPE_TEST_GAIN") else y)


class ClosesOver(Program):
    def __init__(self) -> None:
        super().__init__()
        self.options = options = {"gain": 2.0}
        self.scale = lambda tensor: tensor * options["gain"]

    def forward(self, x: Tensor) -> Any:
        return self.b(self.scale(self.a(x)))


class ComputesAttributes(Program):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["more"] = {"gain": 2.0}

    def __getattr__(self, name: str) -> Any:
        more = self.__dict__.get("more", {})
        return more[name] if name in more else super().__getattr__(name)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x) * self.gain)


def _other_forward(model: Any) -> None:
    model.forward = lambda x: model.a(x)


CHANGES: dict[type[Program], tuple[Callable[[Any], None], str]] = {
    Environment: (lambda model: None, r"os.environ\['FXPIPE_TEST_GAIN'\] was None, is '1'"),
    ClosesOver: (lambda model: model.options.update(gain=3.0), "options was {'gain': 2.0}"),
    ComputesAttributes: (lambda model: model.__dict__["more"].update(gain=3.0), "gain was 2.0"),
    Program: (_other_forward, "forward was .* is a function"),
}


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
def test_what_code_asked_of_the_world_is_compared(
    kind: type[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FXPIPE_TEST_GAIN", raising=False)
    model, (change, words) = kind(), CHANGES[kind]
    x = torch.randn(4, 5, WIDTH)
    pipe = split(model, "spec", x, check=False)
    torch.testing.assert_close(pipe(x), model(x))

    monkeypatch.setenv("FXPIPE_TEST_GAIN", "1")
    change(model)

    with pytest.raises(TraceError, match=words):
        pipe(x)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape[-1], generator=self.generator)


def test_generators_of_a_model_are_where_they_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Noise(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH)
    before = model[1].generator.get_state()

    pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})

    assert torch.equal(model[1].generator.get_state(), before)


class MakesBuffer(Program):
    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "offset"):
            self.register_buffer("offset", torch.ones(WIDTH))
        return self.b(self.a(x) + self.offset)


class Maps(Program):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self._rows)(x)

    def _rows(self, row: Tensor) -> Tensor:
        return self.b(self.a(row))


class MapsWithMarker(Maps):
    def _rows(self, row: Tensor) -> Tensor:
        y = self.a(row)
        pipe_split()
        return self.b(y)


class Transforms(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y) + torch.func.grad(lambda value: value.pow(3).sum())(y)


class Infers(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        with torch.inference_mode():
            y.mean() * 2
        return self.b(y)


class Grows(ClearsLists):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        self.losses.append(y.mean())
        return self.b(y)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (MakesBuffer, TraceError, "makes offset when it first runs\nrun the model once"),
        # There was one stage, and no word about it.
        (Maps, SplitError, "only inside torch.vmap or an autograd function: 'b'"),
        (MapsWithMarker, SplitError, "pipe_split.. at .* is inside torch.vmap"),
        (Transforms, TraceError, "cannot be written as a graph: a transform of torch.func"),
        (Infers, TraceError, "cannot be written as a graph: torch.inference_mode"),
        (Grows, TraceError, r"reads 'losses' .a list. and changes what is in it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_possible_is_said(
    kind: type[Program], error: type[FxpipeError], words: str
) -> None:
    x = torch.randn(4, 5, WIDTH)
    where = {} if kind is MapsWithMarker else {"split_spec": {"b": SplitPoint.BEGINNING}}

    with pytest.raises(error, match=words):
        pipeline(kind(), (x,), check=False, **where)
