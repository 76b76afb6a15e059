"""Halves of a backward are joined only where nobody loses by it."""

from textwrap import dedent

import pytest

from fxpipe.program import (
    Action,
    Edge,
    Edges,
    Kind,
    Placement,
    Program,
    StageCosts,
    fuse_backward,
    simulate,
)
from tests.program.grid import programs


def test_a_first_stage_has_no_use_for_an_input_half():
    program = Program.parse("rank 0: 0F0 0I0 0F1 0I1 0W0 0W1\nrank 1: 1F0 1I0 1W0 1F1 1I1 1W1")

    fused = fuse_backward(program)

    assert str(fused) == dedent("""\
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1I0 1W0 1F1 1I1 1W1""")
    assert fuse_backward(program, keep_input_backward=[0]) == program


def test_halves_are_joined_where_nobody_waits_for_the_first():
    # Stage 2 returns its gradient to stage 1 on the same rank: nobody gains from an early
    # I. Stage 1 returns it to another rank, which would have to wait for the W as well.
    program = Program.of(
        Placement(2, (0, 1, 1)),
        1,
        [
            [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)],
            [
                Action(Kind.FORWARD, 1, 0),
                Action(Kind.FORWARD, 2, 0),
                Action(Kind.BACKWARD_INPUT, 2, 0),
                Action(Kind.BACKWARD_WEIGHT, 2, 0),
                Action(Kind.BACKWARD_INPUT, 1, 0),
                Action(Kind.BACKWARD_WEIGHT, 1, 0),
            ],
        ],
    )

    assert str(fuse_backward(program)) == dedent("""\
        rank 0: 0F0 0B0
        rank 1: 1F0 2F0 2B0 1I0 1W0""")


def test_a_stage_behind_an_edge_without_gradient_is_a_first_stage_too():
    edges = Edges.of(2, [Edge(0, 1, False)])
    program = Program.parse("rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1I0 1W0")

    assert str(fuse_backward(program, edges)) == "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"


def test_useless_halves_inside_pairs_go_too():
    program = Program.parse("""
        rank 0: 0F0 (0F1;0I0)OVERLAP_F_B (0F2;0W0)OVERLAP_F_B (0I1;0I2)OVERLAP_F_B 0W1 0W2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """)

    fused = fuse_backward(program)

    assert str(fused).splitlines()[0] == "rank 0: 0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2"


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("shares", [(1, 1, 1), (1, 1.4, 0.6)])
def test_joining_halves_costs_no_time(name, shares):
    program = programs()[name]
    forward, backward_input, backward_weight = shares
    costs = StageCosts.uniform(
        program.placement,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )

    fused = fuse_backward(program, keep_input_backward=range(program.num_stages))

    before, after = simulate(program, costs), simulate(fused, costs)
    assert after.makespan == pytest.approx(before.makespan)
    assert max(after.peak_memory) == pytest.approx(max(before.peak_memory))
