"""Answer a decision on a tensor's value when the answer can only be one.

Code may ask `if torch.rand([]) < self.layerdrop` with a rate of zero, or look at a
constant tensor. `Decisions` follows the tensors that depend on no input and no
parameter, in leaves too, and can compute them: with the random numbers at both ends
of their range and with several draws. If every answer is the same it is the
answer; otherwise the decision is a real one, and cannot be part of a graph.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fxpipe.errors import TraceError
from fxpipe.graph.nested import SYMBOLIC, map_leaves, walk

__all__ = ["DECISIONS", "RANDOM", "Decisions", "ValueDecidesError", "is_draw"]

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


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
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
    func: Any
    args: Any
    kwargs: Any
    sources: tuple[int, ...]
    is_random: bool


class Decisions:
    """The tensors of a trace whose values follow from constants and random numbers alone."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def note(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
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

    def _compute(self, tensor: torch.Tensor, end: float | None) -> Any:
        """Return a tensor's value, with all uniform draws at one end of their range."""
        needed: set[int] = set()
        stack = [id(tensor)]
        while stack:
            current = stack.pop()
            if current not in needed:
                needed.add(current)
                stack.extend(self._made[current].sources)
        done: dict[int, Any] = {}

        def real(leaf: Any) -> Any:
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


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")
