"""The walk visits everything once, after what it needs."""

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Edges, Kind, Placement, Program, lower, reads, walk, writes
from fxpipe.program.play.walk import step_table
from tests.program.grid import LOWERINGS, programs


@pytest.mark.parametrize("name", programs())
def test_every_action_is_visited_once_and_after_what_it_reads(name):
    program = programs()[name]

    for one in (program, *(lower(program, **options) for options in LOWERINGS.values())):
        edges = Edges.chain(one.num_stages)
        made, halves = set(), {}
        visited = [[] for _ in one.ranks]
        for rank, position, action in walk(one):
            assert position == len(visited[rank])
            visited[rank].append(action)
            if action.kind.is_transfer:
                (value,) = reads(action, edges) or writes(action, edges)
                halves[value] = halves.get(value, 0) + 1
                continue
            for value in reads(action, edges):
                assert value in made
                crosses = (
                    one.placement.stage_to_rank[value.stage]
                    != one.placement.stage_to_rank[value.peer]
                )
                if one.is_lowered and crosses:
                    assert halves[value] == 2
            made.update(writes(action, edges))
        assert tuple(map(tuple, visited)) == one.ranks


def test_the_order_is_that_of_time():
    program = Program.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")

    order = [str(step.action) for step in walk(program)]

    assert order == ["0F0", "0F1", "1F0", "1B0", "1F1", "0B0", "1B1", "0B1"]


def test_a_walk_that_gets_stuck_says_where_before_it_starts():
    program = Program.parse("rank 0: 0F0 0B0\nrank 1: 1B0 1F0")

    with pytest.raises(ScheduleError, match=r"stuck are rank 0 at position 1 \(0B0\), rank 1 at"):
        walk(program)


def test_actions_that_make_no_sense_are_not_visited():
    bad = Program.of(Placement.loop(1, 1), 1, [[Action(Kind.FORWARD, -1, 0)]])

    with pytest.raises(ScheduleError, match="rank 0, position 0, -1F0: stages go from 0 to 0"):
        walk(bad)


def test_edges_for_another_number_of_stages_are_refused():
    program = Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")

    with pytest.raises(ScheduleError, match="edges are for 3 stages, the program has 2"):
        walk(program, Edges.chain(3))


def test_the_table_of_steps_shows_who_waits():
    program = Program.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")

    rows = [" ".join(str(a or "...") for a in row) for row in step_table(program)]

    assert rows == ["0F0 0F1 ... 0B0 ... 0B1", "... 1F0 1B0 1F1 1B1"]
