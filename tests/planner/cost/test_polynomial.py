import itertools
from fractions import Fraction

import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.graph.dims import symbol
from fxpipe.planner.cost.polynomial import Polynomial, fit


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=6, max_size=6))
def test_any_polynomial_is_found_from_a_grid(coefficients):
    grid = {"batch": (2, 3), "sequence": (4, 8, 16)}
    powers = list(itertools.product(range(2), range(3)))

    def value(batch, sequence):
        return sum(
            c * batch**i * sequence**j for c, (i, j) in zip(coefficients, powers, strict=True)
        )

    found = fit(grid, {point: value(*point) for point in itertools.product(*grid.values())})

    assert found({"batch": 7, "sequence": 31}) == value(7, 31)
    assert found.expr.subs({symbol("batch"): 7, symbol("sequence"): 31}) == value(7, 31)


def test_polynomials_add_over_different_names():
    left = fit({"batch": (1, 2)}, {(1,): 3, (2,): 6})
    right = fit({"sequence": (1, 2, 3)}, {(1,): 1, (2,): 4, (3,): 9})

    total = left + right + Polynomial.constant(Fraction(1, 2))

    assert total.expr == 3 * symbol("batch") + symbol("sequence") ** 2 + sympy.Rational(1, 2)
    assert total({"batch": 2, "sequence": 3}) == 15.5
