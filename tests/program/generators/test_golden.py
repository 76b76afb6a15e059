"""Small programs, written out.

The same tables stand in the docstrings, so what people read is what they get.
"""

from __future__ import annotations

import inspect
from textwrap import dedent, indent

import pytest

from fxpipe.program.generators import (
    SCHEDULES,
    dualpipe_v,
    dualpipe_v_down,
    forward_only,
    forward_only_on,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    wave,
    zb_h1,
    zb_h2,
    zbv,
)
from fxpipe.program.program import Placement

GOLDEN = {
    forward_only: (
        (2, 4, 5),
        """\
        rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4
        rank 1: 1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4""",
    ),
    gpipe: (
        (2, 2, 3),
        """\
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2""",
    ),
    looped_bfs: (
        (2, 4, 2),
        """\
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1""",
    ),
    one_f_one_b: (
        (3, 3, 4),
        """\
        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    ),
    interleaved_one_f_one_b: (
        (2, 4, 4),
        """\
        rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    ),
    zb_h1: (
        (3, 3, 4),
        """\
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    ),
    interleaved_zero_bubble: (
        (2, 4, 2),
        """\
        rank 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 0I0 0I1 2W1 0W0 0W1
        rank 1: 1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1""",
    ),
    zb_h2: (
        (2, 2, 4),
        """\
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0I2 0W1 0W2 0I3 0W3
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3""",
    ),
    zbv: (
        (2, 4, 3),
        """\
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2""",
    ),
    v_half: (
        (2, 4, 3),
        """\
        rank 0: 0F0 3F0 3I0 0F1 3W0 3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1: 1F0 2F0 2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 2F2 1I1 2W1 2I2 1I2 1W1 2W2 1W2""",
    ),
    v_min: (
        (2, 4, 3),
        """\
        rank 0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
        rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2""",
    ),
    dualpipe_v_down: (
        (2, 4, 3),
        """\
        rank 0: 0F0 0F1 0F2 3F0 3I0 3F1 3I1 3W0 3W1 3F2 0I0 3I2 0I1 0W0 0I2 3W2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 (1F2;2B0)OVERLAP_F_B 2F2 1I0 2I1 1I1 2I2 1I2 1W0 2W1 1W1 2W2 1W2""",
    ),
    dualpipe_v: (
        (2, 4, 4),
        """\
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3""",  # noqa: E501
    ),
    wave: (
        (2, 4, 4),
        """\
        rank 0: 0F0 0F1 0F2 3F0 3B0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 3B3 0B1 0B2 0B3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2B3 1B3""",
    ),
}


@pytest.mark.parametrize("generator", GOLDEN, ids=lambda g: g.__name__)
def test_small_program_is_as_written(generator):
    sizes, table = GOLDEN[generator]

    program = generator(*sizes)

    assert str(program) == dedent(table)


@pytest.mark.parametrize("generator", GOLDEN, ids=lambda g: g.__name__)
def test_docstring_shows_the_table(generator):
    _, table = GOLDEN[generator]

    assert indent(dedent(table), "    ") in inspect.getdoc(generator)


def test_every_schedule_has_a_golden_table():
    assert {info.generator for info in SCHEDULES.values()} == set(GOLDEN)


def test_forward_only_follows_a_v():
    program = forward_only_on(Placement.v(2, 4), 3)

    assert str(program) == dedent("""\
        rank 0: 0F0 0F1 0F2 3F0 3F1 3F2
        rank 1: 1F0 2F0 1F1 2F1 1F2 2F2""")
    assert indent(str(program), "    ") in inspect.getdoc(forward_only_on)


def test_forward_only_follows_any_placement():
    program = forward_only_on(Placement(2, (1, 0, 0)), 2)

    assert str(program) == dedent("""\
        rank 0: 1F0 2F0 1F1 2F1
        rank 1: 0F0 0F1""")
