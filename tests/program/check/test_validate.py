"""Every fault is found, named and placed; nothing that is sound is refused."""

import re
from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import (
    Action,
    Edge,
    Edges,
    FaultKind,
    Kind,
    Placement,
    Program,
    find_faults,
    lower,
    validate,
)
from tests.program.grid import LOWERINGS, programs
from tests.program.oracle import finishes, is_sound

COMPUTE = """
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
"""
LOWERED = """
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
"""
SHARDED = """
    rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD
    rank 1: 1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1REDUCE_GRAD 1SEND_B1 1RESHARD
"""


def program_of(text: str, changes: dict[str, str] | None = None) -> Program:
    """The program of the text, with some actions replaced by others (all at once)."""
    changes = changes or {}
    assert set(changes) <= set(text.split())
    text = re.sub(r"\S+", lambda word: changes.get(word[0], word[0]), text)
    return Program.parse(text, placement=Placement.loop(2, 2), num_microbatches=2, name="mine")


@pytest.mark.parametrize("text", [COMPUTE, LOWERED, SHARDED])
def test_sound_programs_pass(text):
    validate(program_of(text))


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (COMPUTE, {"0F1": "0F2"}, ["out of range: rank 0, position 1, 0F2: microbatches go"]),
        (COMPUTE, {"0F1": "5F1"}, ["out of range: rank 0, position 1, 5F1: stages go from 0 to"]),
        (COMPUTE, {"0F1": "1F1"}, ["wrong rank: rank 0, position 1, 1F1: stage 1 is on rank 1"]),
        (LOWERED, {"0SEND_F1": "0SEND_F7"}, ["out of range: rank 0, position 3, 0SEND_F7: micro"]),
        (
            LOWERED,
            {"0SEND_F1": "0SEND_F1>4"},
            ["out of range: rank 0, position 3, 0SEND_F1>4: the peer is stage 4, but stages go"],
        ),
        (
            LOWERED,
            {"0SEND_F1": "0SEND_F1>0"},
            ["transfer without an edge: rank 0, position 3, 0SEND_F1>0: stages 0 and 0 are both"],
        ),
        (
            LOWERED,
            {"0SEND_F1": "0SEND_B1>1"},
            ["transfer without an edge: rank 0, position 3, 0SEND_B1>1: no gradient goes from"],
        ),
        (
            COMPUTE,
            {"0F1": "(0F1;1F1)OVERLAP_F_B"},
            ["wrong rank: rank 0, position 1, (0F1;1F1)OVERLAP_F_B: 1F1: stage 1 is on rank 1"],
        ),
        (
            COMPUTE,
            {"0F1": ""},
            ["missing work: rank 0, 0F1: missing: each stage needs a forward for each microbatch"],
        ),
        (COMPUTE, {"0B1": ""}, ["missing work: rank 0, 0B1: missing: no backward, neither whole"]),
        (
            COMPUTE,
            {"0B1": "0I1"},
            ["missing work: rank 0, 0W1: missing: 0I1 leaves its weight gradient to it"],
        ),
        (
            COMPUTE,
            {"0B1": "0W1"},
            ["missing work: rank 0, 0I1: missing: 0W1 needs what it leaves"],
        ),
        (
            COMPUTE,
            {"0B1": "0B1 0B1"},
            ["doubled work: rank 0, position 4, 0B1: done before, on rank 0 at position 3"],
        ),
        (
            COMPUTE,
            {"0B1": "0B1 0W1"},
            ["doubled work: rank 0, position 4, 0W1: 0B1 does this work already, on rank 0 at"],
        ),
        (
            COMPUTE,
            {"0F1": "0F0"},
            [
                "doubled work: rank 0, position 1, 0F0: done before, on rank 0 at position 0",
                "missing work: rank 0, 0F1: missing",
            ],
        ),
        (
            LOWERED,
            {"0SEND_F1": ""},
            ["unmatched transfer: rank 1, position 2, 1RECV_F1: rank 0 has no 0SEND_F1"],
        ),
        (
            LOWERED,
            {"1RECV_F1": ""},
            ["unmatched transfer: rank 0, position 3, 0SEND_F1: rank 1 has no 1RECV_F1"],
        ),
        (
            LOWERED,
            {"1RECV_F1": "", "0SEND_F1": ""},
            ["missing transfer: rank 0, 0SEND_F1: missing: rank 1 reads activation(0->1, micr"],
        ),
        (
            LOWERED,
            {"0SEND_F1": "0SEND_F1 0SEND_F1"},
            ["doubled transfer: rank 0, position 4, 0SEND_F1: occurs 2 times, this is the last"],
        ),
        (
            SHARDED,
            {"0UNSHARD": ""},
            [
                "parameter handling: rank 0, position 0, 0F0: computes while stage 0 is sharded",
                "parameter handling: rank 0, position 2, 0F1: computes while stage 0 is sharded",
                "parameter handling: rank 0, position 5, 0B0: computes while stage 0 is sharded",
                "parameter handling: rank 0, position 7, 0B1: computes while stage 0 is sharded",
                "parameter handling: rank 0, position 9, 0RESHARD: stage 0 is not unsharded here",
            ],
        ),
        (
            SHARDED,
            {"0RESHARD": ""},
            ["parameter handling: rank 0, position 0, 0UNSHARD: stage 0 is never resharded after"],
        ),
        (
            SHARDED,
            {"0RESHARD": "0UNSHARD 0RESHARD"},
            ["parameter handling: rank 0, position 10, 0UNSHARD: stage 0 is unsharded already"],
        ),
        (
            SHARDED,
            {"0REDUCE_GRAD": ""},
            ["parameter handling: rank 0, 0REDUCE_GRAD: missing: other stages are reduced, this"],
        ),
        (
            SHARDED,
            {"0REDUCE_GRAD": "0REDUCE_GRAD 0REDUCE_GRAD"},
            ["parameter handling: rank 0, position 10, 0REDUCE_GRAD: stage 0 is reduced before"],
        ),
        (
            SHARDED,
            {"0REDUCE_GRAD": "", "0B0": "0B0 0REDUCE_GRAD"},
            ["parameter handling: rank 0, position 7, 0REDUCE_GRAD: 0B1 adds to the gradient"],
        ),
        (
            LOWERED,
            {"1RECV_F1": "1SEND_B0", "1SEND_B0": "1RECV_F1"},
            [
                "message order: rank 0, position 3, 0SEND_F1: is message 1 between ranks 0 and 1 "
                "here, but on rank 1 that is 1SEND_B0 at position 2: each end waits"
            ],
        ),
        (
            COMPUTE,
            {"0F1": "0B1", "0B1": "0F1"},
            [
                "read before write: rank 0, position 1, 0B1: reads residual(0, microbatch 1), "
                "written only by 0F1 at position 3",
                "stall: rank 0, position 1, 0B1: waits for gradient(1->0, microbatch 1) from 1B1",
                "stall: rank 1, position 2, 1F1: waits for activation(0->1, microbatch 1) from 0F1 "
                "at position 3 of rank 0, which is itself stuck at position 1, 0B1",
            ],
        ),
        (
            LOWERED,
            {"0F1": "0SEND_F1", "0SEND_F1": "0F1"},
            [
                "read before write: rank 0, position 2, 0SEND_F1: reads activation(0->1, "
                "microbatch 1), written only by 0F1 at position 3",
                "stall: rank 1, position 5, 1F1: waits for activation(0->1, microbatch 1) from "
                "0SEND_F1 at position 2 of rank 0",
            ],
        ),
        (
            LOWERED,
            {"0RECV_B1": "0B1", "0B1": "0RECV_B1"},
            [
                "read before write: rank 0, position 6, 0B1: reads gradient(1->0, microbatch 1), "
                "written only by 0RECV_B1 at position 7",
            ],
        ),
    ],
)
def test_each_fault_is_named_and_placed(text, changes, expected):
    found = [f"{fault.kind.value}: {fault}" for fault in find_faults(program_of(text, changes))]

    assert len(found) == len(expected)
    for line, start in zip(sorted(found), sorted(expected), strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        (Action(Kind.FORWARD, 0), FaultKind.MALFORMED, "needs a microbatch"),
        (Action(Kind.FORWARD, 0, 1, 1), FaultKind.MALFORMED, "only transfers have a peer"),
        (Action(Kind.FORWARD, -2, 1), FaultKind.OUT_OF_RANGE, "stages go from 0 to 1"),
        (Action(Kind.FORWARD, 0, -1), FaultKind.OUT_OF_RANGE, "microbatches go from 0 to 1"),
        (Action(Kind.SEND_ACTIVATION, 0, 1), FaultKind.MALFORMED, "needs the stage at its other"),
        (Action(Kind.UNSHARD, 0, 1), FaultKind.MALFORMED, "takes no microbatch"),
        (Action(Kind.UNSHARD, 0, None, 1), FaultKind.MALFORMED, "only transfers have a peer"),
        (Action(Kind.OVERLAP, 0, 1), FaultKind.MALFORMED, "a pair of compute actions"),
        (
            Action(Kind.FORWARD, 0, 1, parts=(Action(Kind.FORWARD, 0, 1),)),
            FaultKind.MALFORMED,
            "only an OVERLAP has parts",
        ),
        (
            Action(Kind.OVERLAP, 0, 1, parts=(Action(Kind.FORWARD, 0, 1),) * 3),
            FaultKind.MALFORMED,
            "a pair of compute actions",
        ),
        (
            Action.overlap(Action(Kind.FORWARD, 0, 1), Action(Kind.UNSHARD, 0)),
            FaultKind.MALFORMED,
            "a pair of compute actions",
        ),
    ],
)
def test_actions_that_no_text_can_express_are_refused_too(action, kind, message):
    sound = program_of(COMPUTE)
    program = Program.of(sound.placement, 2, [(*sound.ranks[0], action), sound.ranks[1]])

    (fault,) = find_faults(program)

    assert (fault.kind, fault.rank, fault.position, fault.action) == (kind, 0, 4, action)
    assert message in fault.message


def test_all_faults_of_a_kind_are_reported_together_and_the_program_is_named():
    with pytest.raises(ScheduleError) as error:
        validate(program_of(COMPUTE, {"0F1": "", "1B1": "1B1 1B1", "1B0": ""}))

    assert str(error.value) == dedent("""\
        program 'mine' is not valid, 3 faults:
        missing work:
          rank 0, 0F1: missing: each stage needs a forward for each microbatch
          rank 1, 1B0: missing: no backward, neither whole nor as I and W
        doubled work:
          rank 1, position 3, 1B1: done before, on rank 1 at position 2""")


def test_a_long_report_is_cut_short():
    placement = Placement.loop(1, 1)
    forwards = [Action(Kind.FORWARD, 0, m) for m in range(30)]

    with pytest.raises(ScheduleError, match="30 faults") as error:
        validate(Program.of(placement, 30, [forwards * 2]))

    assert str(error.value).endswith("\n  ... and 10 more of this kind")
    assert len(str(error.value).splitlines()) == 23


def test_a_mistyped_microbatch_number_does_not_exhaust_the_memory():
    placement = Placement.loop(1, 1)
    program = Program.of(placement, 10**15, [[Action(Kind.FORWARD, 0, 0)]])

    (fault,) = find_faults(program)

    assert fault.message == f"missing: {10**15} forwards do not fit into 1 actions"


def test_forwards_alone_are_a_program():
    validate(Program.parse("rank 0: 0F0 0F1\nrank 1: 1F0 1F1"))
    validate(Program.parse("rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0"))


def test_a_forward_only_program_moves_no_gradients():
    program = Program.parse("rank 0: 0F0 0SEND_F0 0RECV_B0\nrank 1: 1RECV_F0 1F0 1SEND_B0")

    (fault,) = find_faults(program)

    assert fault.kind is FaultKind.UNMATCHED_TRANSFER
    assert "no forward-only program has gradient(1->0, microbatch 0)" in fault.message


def test_ranks_that_wait_for_each_other_are_told_what_for():
    # Each rank wants the backward of the other one's second microbatch first.
    program = Program.parse("""
        rank 0: 0F0 0F1 3F0 3F1 0B1 3B1 3B0 0B0
        rank 1: 1F0 1F1 2F0 2F1 1B0 2B0 2B1 1B1
    """)

    assert {f.kind for f in find_faults(program)} == {FaultKind.STALL, FaultKind.READ_BEFORE_WRITE}
    with pytest.raises(ScheduleError, match="rank 0, position 4, 0B1: waits for gradient"):
        validate(program)


def test_crossed_messages_stall_on_one_stream_but_not_on_two():
    # Rank 0 sends 0F1 before it receives, rank 1 sends 1B0 before it receives: each is
    # fine alone, but on one unbuffered stream neither message can go first.
    program = Program.parse("""
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)

    (fault,) = find_faults(program)

    assert fault.kind is FaultKind.MESSAGE_ORDER
    assert find_faults(program, streams="direction") == ()
    assert not finishes(program, Edges.chain(2), "pair")
    assert finishes(program, Edges.chain(2), "direction")


def test_messages_out_of_order_within_a_direction_are_refused_in_both_models():
    program = Program.parse("""
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1
        rank 1: 1RECV_F1 1RECV_F0 1F0 1F1
    """)

    for streams in ("pair", "direction"):
        (fault,) = find_faults(program, streams=streams)
        assert fault.kind is FaultKind.MESSAGE_ORDER
        assert fault.message.startswith("is message 0 between ranks 0 and 1 here, but on rank 1")


def test_a_recv_posted_long_before_its_send_is_no_fault():
    program = Program.parse("""
        rank 0: 0RECV_B0 0F0 0SEND_F0 0B0
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
    """)

    assert find_faults(program, streams="direction") == ()
    assert finishes(program, Edges.chain(2), "direction")


def test_skip_edges_need_their_own_transfers():
    edges = Edges.of(3, [(0, 1), (1, 2), (0, 2)])
    chain = lower(Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0\nrank 2: 2F0 2B0"))

    missing = [str(fault.action) for fault in find_faults(chain, edges)]

    assert missing == ["0SEND_F0>2", "2SEND_B0>0"]
    validate(
        lower(Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0\nrank 2: 2F0 2B0"), edges), edges
    )


def test_an_edge_without_gradient_sends_none_back():
    edges = Edges.of(2, [Edge(0, 1, False)])
    program = Program.parse("rank 0: 0F0 0SEND_F0 0B0\nrank 1: 1RECV_F0 1F0 1B0")

    validate(program, edges)
    with pytest.raises(ScheduleError, match="1SEND_B0: missing: rank 0 reads gradient"):
        validate(program)


def test_an_unknown_model_of_streams_is_refused():
    with pytest.raises(
        ScheduleError, match=r"streams is one of \('pair', 'direction', 'rank'\), got 'all'"
    ):
        validate(program_of(COMPUTE), streams="all")


def test_edges_for_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match="edges are for 3 stages, the program has 2"):
        validate(program_of(COMPUTE), Edges.chain(3))


@pytest.mark.parametrize("name", programs())
def test_every_schedule_passes_and_a_second_opinion_agrees(name):
    program = programs()[name]
    edges = Edges.chain(program.num_stages)

    for one in (program, *(lower(program, **options) for options in LOWERINGS.values())):
        assert find_faults(one) == ()
        for streams in ("pair", "direction"):
            assert find_faults(one, streams=streams) == ()
            assert is_sound(one, edges, streams)
