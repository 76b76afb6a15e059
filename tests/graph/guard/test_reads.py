"""Globals, class attributes, closures and context variables that opened code reads are guarded."""

import contextvars
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe import SplitPoint, pipeline
from fxpipe.errors import TraceError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
AT_B = {"b": SplitPoint.BEGINNING}
FACTOR = 2.0
SETTINGS = {"scale": 2.0}
COUNT = 0
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
THIS_FILE = sys.modules[__name__]


class Config:
    scale = 1.0

    def __init__(self) -> None:
        self.rate = 0.5

    def get(self) -> float:
        return self.rate


CONFIG = Config()
UNUSED = 1


class AB(nn.Module):
    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale_by = maker(2.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x) * self.factor())


def maker(number: float) -> Any:
    def scale() -> float:
        return number

    def change(other: float) -> None:
        nonlocal number
        number = other

    scale.change = change  # type: ignore[attr-defined]
    return scale


def helper() -> float:
    return FACTOR


class ReadsGlobal(AB):
    def factor(self) -> float:
        return FACTOR


class ReadsByFunction(AB):
    def factor(self) -> float:
        return helper()


class ReadsDict(AB):
    def factor(self) -> float:
        return SETTINGS["scale"]


class ReadsFile(AB):
    def factor(self) -> float:
        return THIS_FILE.FACTOR


class ReadsObject(AB):
    def factor(self) -> float:
        return CONFIG.get()


class ReadsClass(AB):
    def factor(self) -> float:
        return Config.scale


class ReadsOwnClass(AB):
    def factor(self) -> float:
        return self.gain


class ReadsContext(AB):
    def factor(self) -> float:
        return VARIABLE.get()


class ReadsClosure(AB):
    def factor(self) -> float:
        return self.scale_by()


def set_global(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(THIS_FILE, "FACTOR", 3.0)


def set_dict(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setitem(SETTINGS, "scale", 3.0)


def set_object(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(CONFIG, "rate", 3.0)


def set_class(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(Config, "scale", 3.0)


def set_own_class(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(AB, "gain", 3.0)


def set_context(monkeypatch: Any, model: Any) -> None:
    VARIABLE.set(3.0)


def set_closure(monkeypatch: Any, model: Any) -> None:
    model.scale_by.change(3.0)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (ReadsGlobal, set_global, "FACTOR was 2.0, is 3.0"),
        (ReadsByFunction, set_global, "FACTOR was 2.0, is 3.0"),
        (ReadsDict, set_dict, "SETTINGS was {'scale': 2.0}, is {'scale': 3.0}"),
        (ReadsFile, set_global, "FACTOR was 2.0, is 3.0"),
        (ReadsObject, set_object, "CONFIG.rate was 0.5, is 3.0"),
        (ReadsClass, set_class, "Config.scale was 1.0, is 3.0"),
        (ReadsOwnClass, set_own_class, "gain was 1.5, is 3.0"),
        (ReadsContext, set_context, r"VARIABLE.get\(\) was 1.0, is 3.0"),
        (ReadsClosure, set_closure, "number was 2.0, is 3.0"),
    ],
)
def test_what_code_reads_outside_the_model_is_compared(
    kind: type[AB], change: Any, words: str, monkeypatch: Any
) -> None:
    model = kind()
    pipe = pipeline(model, (X,), split_spec=AT_B)
    torch.testing.assert_close(pipe(X), model(X))

    def after_change() -> None:
        change(monkeypatch, model)
        with pytest.raises(TraceError, match=f"(?s){words}.*test_reads.py"):
            pipe(X)

    contextvars.copy_context().run(after_change)


def test_a_global_that_no_code_mentions_may_change(monkeypatch: Any) -> None:
    model = ReadsGlobal()
    pipe = pipeline(model, (X,), split_spec=AT_B)

    monkeypatch.setattr(THIS_FILE, "UNUSED", 2)

    torch.testing.assert_close(pipe(X), model(X))


class Counts(AB):
    def factor(self) -> float:
        global COUNT
        COUNT += 1
        return COUNT


def test_a_global_that_the_code_changes_is_refused() -> None:
    with pytest.raises(TraceError, match=r"reads 'COUNT' .+ and changes it for its next run"):
        pipeline(Counts(), (X,), split_spec=AT_B)

    assert COUNT == 0


SEEN: list[str] = []
NOTES = [1]


class Logs(AB):
    def factor(self) -> float:
        NOTES.append(2)
        return 1.0


def test_a_container_that_code_only_adds_to_is_no_setting() -> None:
    # A log that a callback writes made every later call an error.
    model = Logs()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        SEEN.append(type(module).__name__)

    model.a.register_forward_hook(note)
    pipe = pipeline(model, (X,), split_spec=AT_B)

    for _ in range(2):
        torch.testing.assert_close(pipe(X), model(X))
