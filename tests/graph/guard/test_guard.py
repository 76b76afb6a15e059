"""What opened code read is compared before each run: followed, or refused by name."""

import collections
import copy
import enum
import gc
import itertools
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxpipe import SplitPoint, TraceError, pipeline
from fxpipe.graph.pipe import Pipe

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
AT_B = {"b": SplitPoint.BEGINNING}


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Config:
    def __init__(self) -> None:
        self.scale, self.unread = 2.0, "x"


class Slotted:
    __slots__ = ("gains", "scale")

    def __init__(self) -> None:
        self.scale, self.gains = 1.0, [1.0]


class Net(nn.Module):
    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.randn(6, 8))
        self.register_buffer("absent", None)
        self.fixed = torch.randn(8)
        self.flag, self.rate, self.name, self.kind = True, 0.5, "one", Kind.ONE
        self.pair, self.unread = (1, 2), 0
        self.weights, self.options = [1.0, 2.0], {"add": {"it": 1.0}}
        self.config, self.slotted = Config(), Slotted()
        self.space = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0))
        self.numbers, self.recent = np.ones(2), collections.deque([1.0])
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x) * self.w + self.table + self.fixed
        x = x + self.rate if self.flag and self.name == "one" and self.kind is Kind.ONE else -x
        x = x * self.weights[1] + self.options["add"]["it"] * self.pair[0] * self.config.scale
        x = x * self.slotted.scale * self.slotted.gains[0] * self.space.inner.gain
        x = x * float(self.numbers[0]) * self.recent[0]
        if hasattr(self, "extra") or self.absent is not None or self.limit > 3:
            x = x * 2
        return self.b(self.act(x))


def split(model: nn.Module) -> Pipe:
    return pipeline(model, (X,), split_spec=AT_B)


def put(name: str, value: Any) -> Callable[[Net], None]:
    return lambda model: setattr(model, name, value)


CHANGES = {
    "flag was True, is False": put("flag", False),
    "rate was 0.5, is 0.25": put("rate", 0.25),
    "name was 'one', is 'two'": put("name", "two"),
    "kind was <Kind.ONE: 1>": put("kind", Kind.TWO),
    r"pair was \(1, 2\), is \(3, 4\)": put("pair", (3, 4)),
    "contents of weights": lambda model: model.weights.append(3.0),
    "contents of options": lambda model: model.options["add"].update(it=7.0),
    "config.scale was 2.0, is 3.0": lambda model: put("scale", 3.0)(model.config),
    "config was a Config": put("config", Config()),
    "slotted.scale was 1.0, is 3.0": lambda model: put("scale", 3.0)(model.slotted),
    r"slotted.gains was \[1.0\], is \[2.0\]": lambda m: m.slotted.gains.__setitem__(0, 2.0),
    "contents of space": lambda model: put("gain", 3.0)(model.space.inner),
    "contents of numbers": lambda model: model.numbers.__setitem__(0, 2.0),
    "contents of recent": lambda model: model.recent.appendleft(2.0),
    "act was <built-in method tanh": put("act", torch.relu),
    r"fixed was float32\[8\]": put("fixed", torch.zeros(8)),
    "extra was nothing, is 1": put("extra", 1),
    "absent was None": put("absent", torch.ones(8)),
    "limit was 3, is 4": put("limit", 4),
    "b was a Linear, is a Identity": put("b", nn.Identity()),
    "forward hooks of the model were 0, are 1": lambda m: m.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_change_of_what_was_read_is_refused_by_name(words: str) -> None:
    model = Net()
    pipe = split(model)
    torch.testing.assert_close(pipe(X), model(X))

    CHANGES[words](model)

    with pytest.raises(TraceError, match=words):
        pipe(X)


def test_what_was_not_read_may_change() -> None:
    model = Net()
    pipe = split(model)

    model.unread, model.other, model.config.unread = 1, 2, "y"

    torch.testing.assert_close(pipe(X), model(X))


def same_now(pipe: Pipe, model: nn.Module, x: torch.Tensor = X) -> None:
    torch.manual_seed(0)
    want = model(x)
    torch.manual_seed(0)
    got = pipe(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_stages_follow_the_tensors_and_flags_of_the_model() -> None:
    class Drops(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = Drops()
    pipe = split(model)

    model.load_state_dict(Drops().state_dict(), assign=True)
    same_now(pipe, model)
    model.eval()
    same_now(pipe, model)
    model.train()
    same_now(pipe, model)
    model.w = nn.Parameter(torch.ones(8))
    same_now(pipe, model)
    model.double()
    model.fixed.data = model.fixed.data.double()
    same_now(pipe, model, X.double())


def test_a_buffer_of_another_size_is_refused() -> None:
    model = Net()
    pipe = split(model)
    model.table = torch.zeros(1, 8)

    with pytest.raises(TraceError, match=r"table was of size \[6, 8\] .* of size \[1, 8\] now"):
        pipe(X)


def test_a_stage_that_was_given_its_own_state_keeps_it() -> None:
    model = Net()
    pipe = split(model)
    stage = next(s.module for s in pipe.stages if "w" in s.module._parameters)
    stage.w = nn.Parameter(torch.zeros(8))
    model.w = nn.Parameter(torch.ones(8))

    with torch.no_grad():
        pipe(X)

    assert torch.equal(stage.w, torch.zeros(8))


def test_modes_that_differ_are_traced_as_they_are_and_guarded() -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.norm(super().forward(x))
            return (x * 2 if self.norm.training else x) * (3 if self.training else 1)

    model = Frozen()
    model.norm.eval()
    pipe = split(model)
    same_now(pipe, model)

    model.norm.train()
    with pytest.raises(TraceError, match="norm is in evaluation; now norm is in training"):
        pipe(X)

    pipe = split(model)  # all alike: for both modes
    same_now(pipe, model)
    model.eval()
    same_now(pipe, model)
    model.train()
    model.norm.eval()
    with pytest.raises(TraceError, match="flags of several modules"):
        pipe(X)


def test_a_flag_that_is_handed_down_is_that_of_the_one_who_read_it() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, training: bool) -> Any:
            return self.k(nn.functional.dropout(self.l(x), 0.9, training))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x, self.training)

    model = Outer()
    pipe = pipeline(model, (X,), split_spec={"inner.k": SplitPoint.BEGINNING})

    for outer, inner in ((True, True), (False, True), (True, False), (False, False)):
        model.train(outer)
        model.inner.train(inner)
        same_now(pipe, model)


@pytest.mark.parametrize(
    ("ask", "change"),
    [
        (lambda: torch.is_grad_enabled(), torch.no_grad),
        (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu")),
    ],
)
def test_a_setting_that_was_asked_for_is_compared(ask: Any, change: Any) -> None:
    class Asks(Net):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                unused = torch.is_grad_enabled()  # its own setting: False, whatever happens
            assert not unused
            return super().forward(x) * (2 if ask() else 1)

    model = Asks()
    pipe = split(model)
    same_now(pipe, model)

    with change(), pytest.raises(TraceError, match=r"torch.is_\w+\(\) was (True|False), is"):
        pipe(X)


class Counts(Net):
    count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.b(self.a(x)) * self.count


class Recurrent(Net):
    state: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        if self.state is not None:
            x = x + self.state
        self.state = x.detach()
        return self.b(x)


class FillsBuffer(Net):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        if self.absent is None:
            self.absent = x.detach().mean((0, 1))
        return self.b(x - self.absent)


class CountsElsewhere(Net):
    """Keeps a number where no attribute of a module shows it."""

    def __init__(self, keeper: Any, count: Callable[[Any], float]) -> None:
        super().__init__()
        self.keeper, self.count = keeper, count

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x)) * self.count(self.keeper)


def count_space(space: Any) -> float:
    space.count += 1
    return float(space.count)


def count_numbers(numbers: Any) -> float:
    numbers[0] += 1
    return float(numbers[0])


def count_recent(recent: Any) -> float:
    recent.append(1.0)
    return float(sum(recent))


@pytest.mark.parametrize(
    ("keeper", "count"),
    [
        (types.SimpleNamespace(count=0), count_space),
        (np.zeros(1), count_numbers),
        (collections.deque([1.0], maxlen=4), count_recent),
        (itertools.count(), next),
        ((n for n in range(9)), next),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_count_that_no_attribute_shows_is_refused(keeper: Any, count: Any) -> None:
    # Stages went on with the number of the trace: nothing sees what C code keeps.
    with pytest.raises(TraceError, match=r"reads 'keeper' .* and changes what is in it"):
        pipeline(CountsElsewhere(keeper, count), (X,), split_spec=AT_B, check=False)


class Collects(Net):
    def forward(self, x: torch.Tensor) -> Any:
        self.options["seen"] = x.detach().mean()
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counts, r"reads 'count' \(0\) and makes it 1"),
        (Recurrent, r"reads 'state' \(None\) and makes it torch.float32"),
        (FillsBuffer, r"reads 'absent' \(None\) and makes it torch.float32\[8\]"),
        (Collects, r"reads 'options' .* and changes what is in it"),
    ],
)
def test_state_that_the_next_run_would_read_is_refused(kind: type[Net], words: str) -> None:
    model = kind()
    before = copy.deepcopy(vars(model))

    with pytest.raises(TraceError, match=words):
        split(model)

    assert {k: v for k, v in vars(model).items() if k == "state"} == {
        k: v for k, v in before.items() if k == "state"
    }


class Caches(Net):
    cached: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.cached is None or len(self.cached) < x.shape[1]:
            self.cached = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
        self.scratch = self.a(x)
        return self.b(self.scratch + self.cached[: x.shape[1]])


def test_caches_and_scratch_are_no_state() -> None:
    model = Caches()
    pipe = split(model)

    assert model.cached is None
    assert "scratch" not in vars(model)
    same_now(pipe, model)
    same_now(pipe, model)


def test_a_guard_keeps_no_model_alive_and_stays_behind_when_a_stage_is_copied() -> None:
    model = Net()
    stage = split(model).get_stage_module(1)
    copied, loaded = copy.deepcopy(stage), pickle.loads(pickle.dumps(Net()))
    alive = weakref.ref(model.a)
    hidden = torch.randn(4, 6, 8)

    model.flag = False
    copied(hidden)
    with pytest.raises(TraceError, match="flag was True"):
        stage(hidden)
    del model, loaded
    gc.collect()

    assert alive() is None
    stage(hidden)


@pytest.mark.parametrize("change", ["replaced", "added", "removed"])
def test_modules_that_are_not_those_of_the_trace_are_refused(change: str) -> None:
    """Stages went on with the old ones, in silence."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    stages = [pipeline(model, (x,), num_stages=2).get_stage_module(i) for i in range(2)]
    stages[1](stages[0](x))
    if change == "replaced":
        model[2] = nn.Linear(4, 4)
    elif change == "added":
        model.append(nn.ReLU())
    else:
        del model[2]
    with pytest.raises(TraceError, match="is not the one that was there when pipeline"):
        stages[0](x)
