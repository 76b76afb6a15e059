from itertools import pairwise

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.viz.numbers import Unit, nice_ticks


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("", 25.5, "25.5"),
        ("", 0, "0"),
        ("layers", 3, "3 layers"),
        ("ms", 12.3456, "12.3 ms"),
        ("ms", 0.0123, "12.3 us"),
        ("s", 0.25, "250 ms"),
        ("us", 2_500_000, "2.5 s"),
        ("bytes", 0, "0 B"),
        ("bytes", 512, "512 B"),
        ("bytes", 4096, "4.1 kB"),
        ("bytes", 1.5 * 2**30, "1.61 GB"),
    ],
)
def test_value_has_the_unit_that_reads_best(unit, value, text):
    assert Unit(unit).text(value) == text


def test_unit_must_be_a_word():
    with pytest.raises(FxpipeError, match="a unit is a word such as 'ms' or 'bytes', got 3"):
        Unit(3)


@pytest.mark.parametrize("end", [1e-6, 0.3, 1, 7, 33, 1234.5, 9e9])
@pytest.mark.parametrize("most", [1, 4, 12])
def test_ticks_are_few_even_and_within_the_range(end, most):
    ticks = nice_ticks(end, most)

    assert ticks[0] == 0
    assert ticks[-1] <= end * 1.001
    assert len(ticks) <= most + 1
    steps = {round((b - a) / end, 9) for a, b in pairwise(ticks)}
    assert len(steps) <= 1


def test_ticks_of_an_empty_range():
    assert nice_ticks(0, 5) == [0.0]
