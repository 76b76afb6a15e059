"""Costs as polynomials of sizes: found from a few examples, exact, quick to evaluate.

The FLOPs, bytes and saved bytes of a module are polynomials of batch and sequence:
linear in the batch, at most quadratic in the sequence. `fit` finds one from
values at a grid of sizes, in whole numbers and fractions, so that one more example can
confirm it exactly. `Polynomial.expr` is the same as a sympy expression.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy

from fxpipe.graph.dims import symbol

__all__ = ["Polynomial", "fit"]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of `coefficient * product of names to the powers`; terms map powers to it."""

    names: tuple[str, ...]
    terms: Mapping[tuple[int, ...], Fraction]

    @staticmethod
    def constant(value: int | Fraction) -> Polynomial:
        return Polynomial((), {(): Fraction(value)} if value else {})

    def __call__(self, sizes: Mapping[str, int]) -> float:
        """The value at given sizes."""
        total = Fraction(0)
        for powers, coefficient in self.terms.items():
            product = coefficient
            for name, power in zip(self.names, powers, strict=True):
                if power:
                    product *= sizes[name] ** power
            total += product
        return float(total)

    @property
    def expr(self) -> sympy.Expr:
        """The same as a sympy expression."""
        total = sympy.Integer(0)
        for powers, coefficient in self.terms.items():
            product = sympy.Rational(coefficient.numerator, coefficient.denominator)
            for name, power in zip(self.names, powers, strict=True):
                product *= symbol(name) ** power
            total += product
        return total

    def __add__(self, other: Polynomial) -> Polynomial:
        names = tuple(dict.fromkeys((*self.names, *other.names)))
        terms: dict[tuple[int, ...], Fraction] = {}
        for part in (self, other):
            place = [names.index(name) for name in part.names]
            for powers, coefficient in part.terms.items():
                key = [0] * len(names)
                for at, power in zip(place, powers, strict=True):
                    key[at] = power
                terms[tuple(key)] = terms.get(tuple(key), Fraction(0)) + coefficient
        return Polynomial(names, {key: value for key, value in terms.items() if value})

    def __str__(self) -> str:
        return str(self.expr)


def fit(
    grid: Mapping[str, Sequence[int]], values: Mapping[tuple[int, ...], int | Fraction]
) -> Polynomial:
    """The polynomial through the values at all points of a grid.

    `grid` maps each name to the sizes tried, one more than its degree; `values` maps the
    points, in the order of `itertools.product`, to what was found there.
    """
    names = tuple(grid)
    axes = [_lagrange(sizes) for sizes in grid.values()]
    terms: dict[tuple[int, ...], Fraction] = {}
    indices = itertools.product(*(range(len(sizes)) for sizes in grid.values()))
    for point, index in zip(itertools.product(*grid.values()), indices, strict=True):
        value = Fraction(values[point])
        if not value:
            continue
        for powers in itertools.product(*(range(len(sizes)) for sizes in grid.values())):
            weight = value
            for axis, at, power in zip(axes, index, powers, strict=True):
                weight *= axis[at][power]
            terms[powers] = terms.get(powers, Fraction(0)) + weight
    return Polynomial(names, {powers: value for powers, value in terms.items() if value})


def _lagrange(points: Sequence[int]) -> list[list[Fraction]]:
    """For each point the coefficients of the polynomial that is 1 there and 0 at the others."""
    result = []
    for at in points:
        coefficients = [Fraction(1)]
        for other in points:
            if other == at:
                continue
            # Multiply by (x - other) / (at - other).
            scale = Fraction(1, at - other)
            shifted = [Fraction(0), *coefficients]
            same = [*coefficients, Fraction(0)]
            coefficients = [(a - other * b) * scale for a, b in zip(shifted, same, strict=True)]
        result.append(coefficients)
    return result
