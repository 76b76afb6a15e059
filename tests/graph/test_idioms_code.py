"""Idioms of real `forward`s, each split in three ways: equal to the plain model, or refused.

A program is a model with one habit. It is cut by a marker, by name and into a number of
stages, and called again, with one row, another length, in the other mode and with other
weights; what it returns, all gradients, buffers and the random state must be the plain
model's. `test_idioms.py` has those that need calls of their own.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe import LocalGroup, Schedule1F1B, SplitPoint, pipe_split, pipeline
from fxpipe.errors import TraceError
from tests.parity import assert_same, run

WIDTH = 8


class Program(nn.Module):
    """Two layers, with a marker between them if it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.marks = False

    def mark(self) -> None:
        if self.marks:
            pipe_split()

    def inputs(self, rows: int, length: int) -> tuple[Any, ...]:
        return (torch.randn(rows, length, WIDTH),)


class Recurrent(Program):
    """Takes its state, None at first, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.cell(self.a(x), state)
        self.mark()
        return self.b(y), state


class Expert(nn.Linear):
    loss: Tensor

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.loss = output.square().mean()
        return output


class Mixture(Program):
    """Adds up what its parts leave on themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.experts[0](self.a(x))
        self.mark()
        x = self.experts[1](x)
        self.aux = x.mean()
        return self.b(x) + self.aux, sum(expert.loss for expert in self.experts)


class Features(Program):
    """Collects what a part returns by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self.a.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found["a"] = output

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        self.mark()
        return self.b(y) + self.found["a"]


class Iterates(Program):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        layers = iter(self.layers)
        x = next(layers)(self.a(x))
        self.mark()
        for layer in layers:
            x = layer(x)
        return self.b(torch.vmap(lambda row: row.cumsum(0))(x))


class Normed(Program):
    """Has parametrized weights, one of them used by hand."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.weighted = norms.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = norms.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.weighted(self.a(x))
        self.mark()
        return self.b(self.spectral(y)) + F.linear(y, self.weighted.weight)


class FrozenNorm(Program):
    """Keeps a part in evaluation whatever the mode, by a `train` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.a(x).transpose(1, 2)).transpose(1, 2)
        self.mark()
        return self.b(F.dropout(y, 0.2, self.training))


def gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


with warnings.catch_warnings():  # scripting is deprecated, and still in use
    warnings.simplefilter("ignore")
    scripted_gelu = torch.jit.script(gelu)


class Scripted(Program):
    def forward(self, x: Tensor) -> Any:
        y = scripted_gelu(self.a(x))
        self.mark()
        return self.b(scripted_gelu(y))


class Regions(Program):
    """Computes a part without gradients and a part in lower precision."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            target = self.a(x)
        self.mark()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(target)
        return y.float() + x


class Tables(Program):
    """Counts in a buffer, and uses views of one parameter in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        y = self.a(x) @ self.pair[0] / self.steps
        self.mark()
        return self.b(y) @ self.pair[1].t()


class Complex(Program):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        pairs = self.a(x).view(*x.shape[:-1], WIDTH // 2, 2)
        turned = torch.view_as_complex(pairs) * self.turn
        self.mark()
        return self.b(torch.view_as_real(turned).flatten(-2))


class Teacher(Program):
    """Moves a frozen copy of a part after it, as self-supervised models do."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                for slow, quick in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                    slow.lerp_(quick, 0.1)
        y = self.a(x) - self.teacher(x)
        self.mark()
        return self.b(y)


class Adds(nn.Linear):
    """Puts a loss into what it is given."""

    def forward(self, input: Tensor, losses: Any = None) -> Tensor:
        output = super().forward(input)
        if isinstance(losses, list):
            losses.append(output.square().mean())
        else:
            losses["last"] = output.abs().mean()
        return output


class Bags(Program):
    """Gives its parts a list and a dict that these put tensors into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adds(WIDTH, WIDTH), Adds(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        losses: list[Tensor] = []
        named: dict[str, Tensor] = {}
        x = self.second(self.first(self.a(x), losses), named)
        self.mark()
        return self.b(self.second(x, losses)), sum(losses), named["last"]


class Keys:
    def __init__(self) -> None:
        self.known: list[Tensor] = []

    def update(self, index: int, key: Tensor) -> Tensor:
        if index == len(self.known):
            self.known.append(key)
        return self.known[0] + key


class Attends(nn.Linear):
    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.index = index

    def forward(self, input: Tensor, keys: Any = None) -> Tensor:
        return input + keys.update(self.index, super().forward(input)).mean(1, keepdim=True)


class FillsKeys(Program):
    """Makes a cache in each call, which its layers fill, and reads it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends(index) for index in range(3))

    def forward(self, x: Tensor) -> Any:
        x, keys = self.a(x), Keys()
        for index, layer in enumerate(self.layers):
            x = layer(x, keys)
            if index == 1:
                self.mark()
        return self.b(x), keys.known[0]


PROGRAMS = (
    Bags, FillsKeys, Recurrent, Mixture, Features, Iterates, Normed, FrozenNorm, Scripted, Regions,
    Tables, Complex,
)  # fmt: skip
WAYS = ("marker", "name", "number")


# Into a number of stages the teacher is refused: its parts get into two of them.
@pytest.mark.parametrize(
    ("kind", "how"),
    [*((kind, how) for kind in PROGRAMS for how in WAYS), (Teacher, "marker"), (Teacher, "name")],
)
def test_three_ways_to_cut_give_the_plain_model(kind: type[Program], how: str) -> None:
    torch.manual_seed(0)
    model = kind()
    model.marks = how == "marker"
    plain = copy.deepcopy(model)
    cuts: dict[str, Any] = {
        "marker": {},
        "name": {"split_spec": {"b": SplitPoint.BEGINNING}},
        "number": {"num_stages": 2},
    }
    pipe = pipeline(model, model.inputs(4, 6), **cuts[how])
    assert len(pipe.stages) == 2

    check(plain, pipe, model.inputs(4, 6))
    check(plain, pipe, model.inputs(1, 6))
    check(plain, pipe, model.inputs(3, 9))
    for training in (False, True):
        for part in (plain, *(stage.module for stage in pipe.stages)):
            part.train(training)
        check(plain, pipe, model.inputs(2, 6))
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(0.9)
    check(plain, pipe, model.inputs(2, 6))
    for one in (model, plain):
        one.load_state_dict(copy.deepcopy(one.state_dict()), assign=True)
    check(plain, pipe, model.inputs(2, 6))


def check(plain: nn.Module, pipe: Any, args: tuple[Any, ...]) -> None:
    expected = run(plain, args)
    drawn = torch.get_rng_state()
    found = run(pipe, args)
    assert_same(expected, found)
    assert torch.equal(drawn, torch.get_rng_state())


class MadeLate(Program):
    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "more"):
            self.more = nn.Linear(WIDTH, WIDTH)
            nn.init.eye_(self.more.weight)
        return self.b(self.more(self.a(x)))


class Lazy(Program):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.more(self.a(x)))


@pytest.mark.parametrize("kind", [MadeLate, Lazy])
def test_modules_made_at_first_use_are_wanted_before(kind: type[Program]) -> None:
    model = kind()
    args = model.inputs(2, 3)
    with pytest.raises(TraceError, match=r"(?s)more.*first runs.*run .* once with these inputs"):
        pipeline(model, args, num_stages=2)

    model(*args)

    check(copy.deepcopy(model), pipeline(model, args, num_stages=2), args)


class Packs(Program):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(self.a(x), lengths, batch_first=True)
        found, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.b(found)


class PacksInside(Program):
    def __init__(self) -> None:
        super().__init__()
        self.packs = Packs()

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.b(self.packs(self.a(x), lengths))


def test_packed_sequences_stay_inside_a_module() -> None:
    args = (torch.randn(4, 6, WIDTH), torch.tensor([6, 5, 3, 2]))
    with pytest.raises(TraceError, match=r"(?s)pack_padded_sequence.*test_idioms_code.*submodule"):
        pipeline(Packs(), args, split_spec={"b": SplitPoint.BEGINNING})

    model = PacksInside()
    plain = copy.deepcopy(model)
    check(plain, pipeline(model, args, split_spec={"b": SplitPoint.BEGINNING}), args)
    # Into stages of equal weight: the module that cannot be opened is one call.
    model = copy.deepcopy(plain)
    check(plain, pipeline(model, args, num_stages=2), args)


class Scales(Program):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y) * y.abs().max().item() + y.detach()[0, 0].tolist()[0]


def test_a_number_that_crosses_a_cut_keeps_its_digits() -> None:
    # A schedule refused every step: "'item_value': returned float32[], agreed float64[]".
    model = Scales()
    args = model.inputs(4, 6)
    pipe = pipeline(model, args, split_spec={"b": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(index, "cpu", LocalGroup(2)) for index in range(2)]
    schedule = Schedule1F1B(stages, n_microbatches=1, loss_fn=lambda y, _: y.square().mean())

    plain = copy.deepcopy(model)
    plain(*args).square().mean().backward()
    schedule.step(*args, target=args[0])

    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Translates(nn.Module):
    """nn.Transformer: its decoder needs a size that only the target has."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.core(source, target, tgt_mask=mask, tgt_is_causal=True)


def test_a_stage_reads_an_input_for_its_size() -> None:
    # "stage 0 needs the size target_1, and no earlier stage has it; move the split"
    model = Translates()
    args = (torch.randn(2, 5, WIDTH), torch.randn(2, 4, WIDTH))
    plain = copy.deepcopy(model)
    pipe = pipeline(model, args, num_stages=2)

    check(plain, pipe, args)
    check(plain, pipe, (torch.randn(3, 4, WIDTH), torch.randn(3, 7, WIDTH)))
