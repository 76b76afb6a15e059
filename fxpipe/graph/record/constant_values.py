"""Answer a decision on a value that seems open when the answer can only be one.

Code may ask `if torch.rand([]) < self.layerdrop` with a rate of zero, or look at a
constant tensor. `Decisions` follows the tensors that depend on no input and no
parameter, in leaves too, and can compute them: with the random numbers at both ends
of their range and with several draws. If every answer is the same it is the
answer; otherwise the decision is a real one, and cannot be part of a graph.

A number from `random` or `numpy.random` would become a constant of the graph. While a trace runs
opened code, `watched_draws` has the usual functions return a `Draw`, which knows its
range: code that only asks whether it is below a rate of zero gets its answer, any
other use is reported. Other draws show in the state of the generators. So are draws of a
`random.Random()` that a module keeps. Seeds that code sets, and generators that it makes, are
refused: a stage has a generator of its own.
"""

from __future__ import annotations

import dataclasses
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fxpipe.errors import TraceError
from fxpipe.graph.nested import SYMBOLIC, Args, Kwargs, map_leaves, walk
from fxpipe.graph.sandbox.patches import patched
from fxpipe.graph.sandbox.restore import device_kinds
from fxpipe.graph.source_line import an_effect, is_users, user_frame

__all__ = [
    "DECISIONS",
    "RANDOM",
    "Chance",
    "Decisions",
    "Draw",
    "ValueDecidesError",
    "is_draw",
    "watched_draws",
]

# Functions that hand the value of a tensor to Python.
DECISIONS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__"}
)
_DRAWS = 8
_HIGHEST = 1.0 - 2**-24
_UNIFORM = {"rand", "rand_like", "uniform_"}
RANDOM = {
    *_UNIFORM, "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_",
    "bernoulli", "bernoulli_", "multinomial", "exponential_", "random_", "dropout", "poisson",
    "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "feature_dropout", "gumbel_softmax", "rrelu", "rrelu_", "cauchy_", "geometric_",
    "log_normal_", "fractional_max_pool2d", "fractional_max_pool3d",
}  # fmt: skip
# Functions with a rate of dropout among their arguments, by its position.
_RATED = {
    "scaled_dot_product_attention": ("dropout_p", 4), "multi_head_attention_forward": (
        "dropout_p", 10), "dropout": ("p", 1), "dropout1d": ("p", 1), "dropout2d": ("p", 1),
    "dropout3d": ("p", 1), "alpha_dropout": ("p", 1), "feature_alpha_dropout": ("p", 1),
}  # fmt: skip
_LARGEST = 1024  # elements of a tensor that is worth following


def is_draw(func: object, args: Args, kwargs: Kwargs) -> bool:
    """Say whether a function takes random numbers, in training at least."""
    name = _name(func)
    if name in _RATED:
        keyword, position = _RATED[name]
        rate = kwargs.get(keyword, args[position] if len(args) > position else name in RANDOM)
        return bool(rate != 0)
    return name in RANDOM


class ValueDecidesError(TraceError):
    """Opened code needs the value of a tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """How to make a tensor again."""

    tensor: torch.Tensor
    func: Callable[..., torch.Tensor]
    args: Args
    kwargs: Kwargs
    sources: tuple[int, ...]
    is_random: bool


class Decisions:
    """The tensors of a trace whose values follow from constants and random numbers alone."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def note(self, func: Any, args: Args, kwargs: Kwargs, output: object) -> None:
        """Remember how a tensor was made, if from nothing but constants and draws."""
        if not isinstance(output, torch.Tensor) or any(output is arg for arg in args):
            for leaf in (output, *args):
                if isinstance(leaf, torch.Tensor):
                    self._made.pop(id(leaf), None)  # changed in place: no longer known
            return
        if len(args) and isinstance(args[0], torch.Tensor) and id(args[0]) not in self._made:
            return
        if not _is_small(output):
            return
        sources: list[int] = []
        for _, leaf in walk((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in self._made:
                    return
                sources.append(id(leaf))
            elif isinstance(leaf, SYMBOLIC):
                return
        is_random = _name(func) in RANDOM or any(self._made[key].is_random for key in sources)
        self._made.pop(id(output), None)
        self._made[id(output)] = _Made(output, func, args, kwargs, tuple(sources), is_random)

    def settled(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the one value that a tensor always has, in a list; empty if there is none."""
        if id(tensor) not in self._made:
            return []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            is_random = self._made[id(tensor)].is_random
            ends: list[float | None] = [0.0, _HIGHEST] if is_random else []
            draws: list[float | None] = [None] * (_DRAWS if is_random else 1)
            try:
                found = [self._compute(tensor, end) for end in (*ends, *draws)]
            except Exception:
                return []
        return found[:1] if all(torch.equal(value, found[0]) for value in found) else []

    def drawn(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return a value of a tensor that random numbers decide, in a list: for the largest."""
        made = self._made.get(id(tensor))
        if made is None or not made.is_random:
            return []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return [self._compute(tensor, _HIGHEST)]

    def numbers(self, tensor: torch.Tensor) -> set[float]:
        """Return the numbers that a tensor was made with, such as a rate it is held to."""
        made = self._made[id(tensor)]
        found = {leaf for _, leaf in walk((made.args, made.kwargs)) if isinstance(leaf, float)}
        for source in made.sources:
            found |= self.numbers(self._made[source].tensor)
        return found

    def _compute(self, tensor: torch.Tensor, end: float | None) -> torch.Tensor:
        """Return a tensor's value, with all uniform draws at one end of their range."""
        needed: set[int] = set()
        stack = [id(tensor)]
        while stack:
            current = stack.pop()
            if current not in needed:
                needed.add(current)
                stack.extend(self._made[current].sources)
        done: dict[int, torch.Tensor] = {}

        def real(leaf: object) -> object:
            return done[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

        for current, made in self._made.items():  # in the order they were made
            if current in needed:
                kwargs = {key: value for key, value in made.kwargs.items() if key != "device"}
                value = made.func(*map_leaves(real, made.args), **map_leaves(real, kwargs))
                if end is not None and _name(made.func) in _UNIFORM:
                    value.fill_(end)
                done[current] = value
        return done[id(tensor)]


def _is_small(tensor: torch.Tensor) -> bool:
    sizes = tuple(tensor.shape)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    return tensor.numel() <= _LARGEST


def _name(func: object) -> str:
    return getattr(func, "__name__", "")


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


def _comparing(name: str) -> Callable[[Draw, object], object]:
    compare: Callable[[object, object], object] = getattr(operator, name)

    def method(self: Draw, other: object) -> object:
        answers = [compare(end, other) for end in (self.low, float(self), self.high)]
        if len(set(answers)) > 1:
            self.report()
        return answers[1]

    return method


def _using(name: str) -> Callable[..., object]:
    plain: Callable[..., object] = getattr(float, name)

    def method(self: Draw, *others: object) -> object:
        self.report()
        return plain(self, *others)

    return method


for _method in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Draw, _method, _comparing(_method))
for _method in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
    "__neg__", "__abs__", "__int__", "__bool__", "__round__", "__floor__", "__ceil__", "__trunc__",
    "__eq__", "__ne__",
):  # fmt: skip
    setattr(Draw, _method, _using(_method))


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


def _states() -> tuple[object, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.random.get_state()
    return (random.getstate(), keys.tobytes(), *rest)


_SEEDS: tuple[tuple[object, str], ...] = (
    (torch, "manual_seed"), (torch, "seed"), (torch, "set_rng_state"), (torch.random, "fork_rng"),
    (torch.random, "manual_seed"), (torch.random, "set_rng_state"),
    *((home, name) for home in {torch.cuda, *map(torch.get_device_module, device_kinds()[1:])}
      for name in ("manual_seed", "manual_seed_all") if hasattr(home, name)),
)  # fmt: skip


@contextmanager
def watched_draws(
    is_opened: Callable[[], bool], report: Report, refuse: Callable[[str], None], module: nn.Module
) -> Iterator[None]:
    """Have the plain functions for numbers return a `Draw` to opened code, until exit."""

    def watched(original: Callable[..., object]) -> Callable[..., object]:
        def draw(*args: Any, **kwargs: object) -> object:
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

    def own(original: Callable[..., object]) -> Callable[..., object]:
        def draw(self: object, *args: object) -> object:
            if id(self) in kept and is_opened():
                report()
            return original(self, *args)

        return draw

    def seeding(original: Callable[..., object], name: str) -> Callable[..., object]:
        def seed(*args: object, **kwargs: object) -> object:
            if is_opened() and is_users(sys._getframe(1).f_code.co_filename):
                refuse(an_effect(name, user_frame()))
            return original(*args, **kwargs)

        return seed

    numpy = sys.modules.get("numpy")
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
