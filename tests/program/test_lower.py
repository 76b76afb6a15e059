"""Lowering adds what it should, where it should, and changes nothing else."""

import gc
import random
from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import (
    Action,
    Edge,
    Edges,
    Kind,
    Link,
    Placement,
    Program,
    StageCosts,
    find_faults,
    lower,
    reads,
    simulate,
    validate,
    writes,
)
from tests.program.grid import LOWERINGS, programs
from tests.program.oracle import finishes, is_sound

ONE_F_ONE_B = Program.parse("""
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
""")


def test_early_receives_are_posted_when_the_sender_sends():
    assert str(lower(ONE_F_ONE_B)) == dedent("""\
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0B2
        rank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2""")


def test_late_receives_wait_for_their_reader_or_the_next_message_of_the_pair():
    program = lower(ONE_F_ONE_B, receives="late")

    assert str(program) == dedent("""\
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2
        rank 1: 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2""")


def test_moving_each_recv_to_its_reader_by_itself_stalls():
    # The tempting shortcut: what "late" would be without heeding the pair's other
    # messages. Both ranks then wait for the other one to receive first.
    naive = Program.parse("""
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)

    assert not finishes(naive, Edges.chain(2), "pair")
    assert find_faults(naive)


@pytest.mark.parametrize("name", programs())
def test_every_schedule_and_option_gives_a_sound_program(name):
    program = programs()[name]
    text = str(program)
    edges = Edges.chain(program.num_stages)

    for options in LOWERINGS.values():
        lowered = lower(program, **options)
        assert is_sound(lowered, edges, "pair")
        assert is_sound(lowered, edges, "direction")
        assert lowered.name == program.name
    assert str(program) == text


@pytest.mark.parametrize("name", programs())
def test_without_fusing_the_compute_actions_stay_as_they_are(name):
    program = programs()[name]

    for receives in ("early", "late"):
        lowered = lower(program, receives=receives, fuse=False)
        kept = [
            tuple(a for a in actions if a.kind.is_compute or a.parts) for actions in lowered.ranks
        ]
        assert tuple(kept) == program.ranks


@pytest.mark.parametrize("name", programs())
def test_late_keeps_the_messages_of_each_pair_in_order(name):
    program = programs()[name]

    def messages(lowered: Program) -> list[list[Action]]:
        stage_to_rank = lowered.placement.stage_to_rank
        return [
            [a for a in actions if a.kind.is_transfer and stage_to_rank[a.peer] == other]
            for actions in lowered.ranks
            for other in range(lowered.num_ranks)
        ]

    assert messages(lower(program)) == messages(lower(program, receives="late"))


def test_a_skip_goes_straight_to_where_it_is_used():
    edges = Edges.of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    program = Program.parse("rank 0: 0F0 1F0 1B0 0B0\nrank 1: 2F0 3F0 3B0 2B0")

    lowered = lower(program, edges)

    assert str(lowered) == dedent("""\
        rank 0: 0F0 0SEND_F0>3 1F0 1SEND_F0 0RECV_B0<3 1RECV_B0 1B0 0B0
        rank 1: 3RECV_F0<0 2RECV_F0 2F0 3F0 3B0 3SEND_B0>0 2B0 2SEND_B0""")
    validate(lowered, edges)


def test_an_edge_without_gradient_returns_none():
    edges = Edges.of(2, [Edge(0, 1, False)])
    program = Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")

    assert str(lower(program, edges)) == dedent("""\
        rank 0: 0F0 0SEND_F0 0B0
        rank 1: 1RECV_F0 1F0 1B0""")


def test_neighbours_on_one_rank_exchange_nothing():
    program = Program.of(
        Placement.v(1, 2),
        1,
        [[Action(k, s, 0) for k, s in ((Kind.FORWARD, 0), (Kind.FORWARD, 1))]],
    )

    assert lower(program).ranks == program.ranks


def test_a_pair_receives_before_and_sends_after_itself():
    program = Program.parse("""
        rank 0: 0F0 0F1 3F0 (0F2;3B0)OVERLAP_F_B 3F1 3B1 0B0 0B1 3F2 3B2 0B2
        rank 1: 1F0 2F0 1F1 2F1 (1F2;2B0)OVERLAP_F_B 1B0 2F2 2B1 1B1 2B2 1B2
    """)

    row = str(lower(program, receives="late")).splitlines()[1]

    assert "1RECV_F2 2RECV_B0 (1F2;2B0)OVERLAP_F_B 1B0" in row
    assert row.index("(1F2;2B0)OVERLAP_F_B") < row.index("1SEND_B0")


def test_a_lowered_program_is_not_lowered_again():
    with pytest.raises(ScheduleError, match="the program is lowered already"):
        lower(lower(ONE_F_ONE_B))


def test_an_unsound_program_is_not_lowered():
    with pytest.raises(ScheduleError, match="rank 1, position 0, 1B0: reads residual"):
        lower(Program.parse("rank 0: 0F0 0B0\nrank 1: 1B0 1F0"))
    with pytest.raises(ScheduleError, match="0B0: missing"):
        lower(Program.parse("rank 0: 0F0\nrank 1: 1F0 1B0"))


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ScheduleError, match="max_unsharded must be at least 1, got 0"):
        lower(ONE_F_ONE_B, max_unsharded=0)
    with pytest.raises(ScheduleError, match=r"receives is one of .*, got 'soon'"):
        lower(ONE_F_ONE_B, receives="soon")


@pytest.mark.parametrize("name", [n for n, p in programs().items() if "OVERLAP" not in str(p)])
@pytest.mark.parametrize("latency", [0.0, 0.2])
def test_messages_ordered_by_the_real_costs_hardly_wait_for_each_other(name, latency):
    # Ordered by rank number instead of time, messages between two ranks wait for one that
    # is ready only later: 27% of a step for interleaved 1F1B on 8 ranks. (The two messages
    # of a pair of actions leave at the same time, so one of them always waits.) What is left is
    # that a sender learns with that latency that it is awaited.
    program = programs()[name]
    costs = StageCosts.uniform(program.placement, link=Link(latency))
    alone = simulate(program, costs)

    ordered = simulate(lower(program, fuse=False, costs=costs), costs, streams="direction")

    assert ordered.makespan <= alone.makespan * (1.035 if latency else 1.001)


def random_program(chance: random.Random) -> tuple[Program, Edges]:
    """Any order that respects the dependencies, on any placement and graph of stages."""
    num_stages = chance.randint(1, 6)
    num_ranks = chance.randint(1, num_stages)
    extra = [chance.randrange(num_ranks) for _ in range(num_stages - num_ranks)]
    stage_to_rank = [*range(num_ranks), *extra]
    chance.shuffle(stage_to_rank)
    links = {
        (source, target): chance.random() < 0.8
        for source in range(num_stages)
        for target in range(source + 1, num_stages)
        if target == source + 1 or chance.random() < 0.2
    }
    edges = Edges.of(num_stages, [Edge(*ends, flag) for ends, flag in links.items()])
    num_microbatches = chance.randint(1, 5)
    left = []
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            is_split = chance.random() < 0.5
            kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if is_split else (Kind.BACKWARD,)
            left += [Action(kind, stage, microbatch) for kind in (Kind.FORWARD, *kinds)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    made = set()
    while left:
        ready = [action for action in left if made.issuperset(reads(action, edges))]
        action = chance.choice(ready)
        left.remove(action)
        made.update(writes(action, edges))
        ranks[stage_to_rank[action.stage]].append(action)
    placement = Placement(num_ranks, tuple(stage_to_rank))
    return Program.of(placement, num_microbatches, ranks), edges


@pytest.mark.parametrize("seed", range(60))
def test_any_program_on_any_graph_is_lowered_to_a_sound_one(seed):
    program, edges = random_program(random.Random(seed))

    validate(program, edges)
    for options in LOWERINGS.values():
        lowered = lower(program, edges, **options)
        assert is_sound(lowered, edges, "pair")
        assert is_sound(lowered, edges, "direction")


@pytest.mark.parametrize("name", programs())
def test_every_schedule_copes_with_skips_and_edges_without_gradient(name):
    program = programs()[name]
    chance = random.Random(name)
    stages = range(program.num_stages)
    edges = Edges.of(
        program.num_stages,
        [
            Edge(source, target, chance.random() < 0.7)
            for source in stages
            for target in stages[source + 1 :]
            if target == source + 1 or chance.random() < 0.3
        ],
    )

    validate(program, edges)
    for receives in ("early", "late"):
        assert is_sound(lower(program, edges, receives=receives), edges, "pair")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_left_as_it_was_found(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        lower(ONE_F_ONE_B)
        with pytest.raises(ScheduleError):
            lower(Program.parse("rank 0: 0F0\nrank 1: 1F0 1B0"))
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
