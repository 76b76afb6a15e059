"""Notice Python's random numbers in opened code: a graph would repeat one draw for ever.

torch's random functions are nodes and draw anew in every run. A number from
`random` or `numpy.random` is not; it would become a constant. While a trace runs
opened code, `watched_draws` has the usual functions return a `Draw`, which knows its
range: code that only asks whether it is below a rate of zero gets its answer, any
other use is reported. Other draws show in the state of the generators.

So are draws of a `random.Random()` that a module keeps. Seeds that code sets, and generators that
it makes, are refused: a stage has a generator of its own.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fxpipe.graph.sandbox.patches import patched
from fxpipe.graph.source_line import an_effect, is_users, user_frame

__all__ = ["Chance", "Draw", "watched_draws"]

Report = Callable[[], None]


class Draw(float):
    """A random number between two others; `report` is called if it decides something."""

    low: float
    high: float
    report: Report

    def __new__(cls, low: float, high: float, report: Report) -> Draw:
        made = super().__new__(cls, (low + high) / 2)
        # The ends themselves are never drawn, or once in many years.
        margin = (high - low) * 1e-12
        made.low, made.high, made.report = low + margin, high - margin, report
        return made

    __hash__ = float.__hash__


def _comparing(name: str) -> Callable[[Draw, Any], Any]:
    compare: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: Draw, other: Any) -> Any:
        answers = [compare(end, other) for end in (self.low, float(self), self.high)]
        if len(set(answers)) > 1:
            self.report()
        return answers[1]

    return method


def _using(name: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(float, name)

    def method(self: Draw, *others: Any) -> Any:
        self.report()
        return plain(self, *others)

    return method


for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Draw, _name, _comparing(_name))
for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
    "__neg__", "__abs__", "__int__", "__bool__", "__round__", "__floor__", "__ceil__", "__trunc__",
    "__eq__", "__ne__",
):  # fmt: skip
    setattr(Draw, _name, _using(_name))


class Chance:
    """The states of Python's and numpy's global generators."""

    def __init__(self) -> None:
        self._seen = _states()

    def settle(self) -> None:
        """Take the present states as known."""
        self._seen = _states()

    def was_drawn(self) -> bool:
        """Say whether something was drawn since the last time."""
        before, self._seen = self._seen, _states()
        return self._seen != before


def _states() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.random.get_state()
    return (random.getstate(), keys.tobytes(), *rest)


_SEEDS: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"), (torch, "seed"), (torch, "set_rng_state"), (torch.random, "fork_rng"),
    (torch.random, "manual_seed"), (torch.random, "set_rng_state"), (torch.cuda, "manual_seed"),
    (torch.cuda, "manual_seed_all"),
)  # fmt: skip


@contextmanager
def watched_draws(
    is_opened: Callable[[], bool], report: Report, refuse: Callable[[str], None], module: nn.Module
) -> Iterator[None]:
    """Have the plain functions for numbers return a `Draw` to opened code, until exit."""

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not is_opened() or kwargs:
                return original(*args, **kwargs)
            if not args:
                return Draw(0.0, 1.0, report)
            if len(args) == 2 and all(type(arg) in (int, float) for arg in args):
                return Draw(min(args), max(args), report)
            return original(*args)

        return draw

    # Libraries draw names of files and the like from generators of their own.
    attributes = [value for part in module.modules() for value in vars(part).values()]
    kept = {id(value) for value in attributes if isinstance(value, random.Random)}

    def own(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(self: Any, *args: Any) -> Any:
            if id(self) in kept and is_opened():
                report()
            return original(self, *args)

        return draw

    def seeding(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            if is_opened() and is_users(sys._getframe(1).f_code.co_filename):
                refuse(an_effect(name, user_frame()))
            return original(*args, **kwargs)

        return seed

    numpy: Any = sys.modules.get("numpy")
    with ExitStack() as stack:
        for name in ("random", "getrandbits"):
            method = own(getattr(random.Random, name))
            stack.enter_context(patched(random.Random, name, method))
        for place, name in _SEEDS:
            method = seeding(getattr(place, name), name)
            stack.enter_context(patched(place, name, method))
        for place in [random] if numpy is None else [random, numpy.random]:
            for name in ("random", "uniform", "rand"):
                if hasattr(place, name):
                    value = watched(getattr(place, name))
                    stack.enter_context(patched(place, name, value))
        yield
