"""The table of dependencies, on a chain, with a skip, and with an edge that has no gradient."""

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Action, Edge, Edges, Kind, ValueKind, parse_action, reads, writes
from fxpipe.program.action import recv_of, send_of

CHAIN = Edges.chain(3)
SKIP = Edges.of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
NO_GRADIENT = Edges.of(3, [Edge(0, 1, False), Edge(1, 2)])


def table(text: str, edges: Edges) -> tuple[str, str]:
    action = parse_action(text)
    return (
        ", ".join(map(str, reads(action, edges))),
        ", ".join(map(str, writes(action, edges))),
    )


@pytest.mark.parametrize(
    ("text", "edges", "expected"),
    [
        ("0F5", CHAIN, ("", "activation(0->1, microbatch 5), residual(0, microbatch 5)")),
        (
            "1F5",
            CHAIN,
            (
                "activation(0->1, microbatch 5)",
                "activation(1->2, microbatch 5), residual(1, microbatch 5)",
            ),
        ),
        ("2F5", CHAIN, ("activation(1->2, microbatch 5)", "residual(2, microbatch 5)")),
        (
            "1B5",
            CHAIN,
            (
                "gradient(2->1, microbatch 5), residual(1, microbatch 5)",
                "gradient(1->0, microbatch 5), weight_grad(1, microbatch 5)",
            ),
        ),
        (
            "1I5",
            CHAIN,
            (
                "gradient(2->1, microbatch 5), residual(1, microbatch 5)",
                "gradient(1->0, microbatch 5), deferred(1, microbatch 5)",
            ),
        ),
        ("1W5", CHAIN, ("deferred(1, microbatch 5)", "weight_grad(1, microbatch 5)")),
        ("0SEND_F5", CHAIN, ("activation(0->1, microbatch 5)", "")),
        ("1RECV_F5", CHAIN, ("", "activation(0->1, microbatch 5)")),
        ("1SEND_B5", CHAIN, ("gradient(1->0, microbatch 5)", "")),
        ("0RECV_B5", CHAIN, ("", "gradient(1->0, microbatch 5)")),
        ("1UNSHARD", CHAIN, ("", "")),
        ("1RESHARD", CHAIN, ("", "")),
        ("1REDUCE_GRAD", CHAIN, ("", "")),
        (
            "(2F1;2B1)OVERLAP_F_B",
            CHAIN,
            (
                "activation(1->2, microbatch 1)",
                "residual(2, microbatch 1), gradient(2->1, microbatch 1), "
                "weight_grad(2, microbatch 1)",
            ),
        ),
        (
            "3F0",
            SKIP,
            (
                "activation(0->3, microbatch 0), activation(2->3, microbatch 0)",
                "residual(3, microbatch 0)",
            ),
        ),
        (
            "0B0",
            SKIP,
            (
                "gradient(1->0, microbatch 0), gradient(3->0, microbatch 0), "
                "residual(0, microbatch 0)",
                "weight_grad(0, microbatch 0)",
            ),
        ),
        ("0B0", NO_GRADIENT, ("residual(0, microbatch 0)", "weight_grad(0, microbatch 0)")),
        (
            "1B0",
            NO_GRADIENT,
            (
                "gradient(2->1, microbatch 0), residual(1, microbatch 0)",
                "weight_grad(1, microbatch 0)",
            ),
        ),
    ],
)
def test_what_each_action_reads_and_writes(text, edges, expected):
    assert table(text, edges) == expected


def test_every_kind_has_a_row_in_the_table():
    # A new kind must say what it reads and writes before anything else can use it.
    known = {"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"} | {
        "UNSHARD",
        "RESHARD",
        "REDUCE_GRAD",
        "OVERLAP_F_B",
        "OFFLOAD",
        "RELOAD",
    }

    assert {kind.text for kind in Kind} == known


def test_a_value_knows_its_two_transfers():
    for text in ("0SEND_F1>3", "3SEND_B1>0"):
        send = parse_action(text)
        (value,) = reads(send, SKIP)

        assert send_of(value) == send
        assert writes(recv_of(value), SKIP) == (value,)
        assert value.kind in (ValueKind.ACTIVATION, ValueKind.GRADIENT)


def test_a_pair_carries_stage_and_microbatch_of_its_first_part():
    pair = Action.overlap(parse_action("0F5"), parse_action("7B1"))

    assert (pair.stage, pair.microbatch) == (0, 5)


def test_edges_know_both_ends():
    assert [edge.source for edge in SKIP.into(3)] == [0, 2]
    assert [edge.target for edge in SKIP.out_of(0)] == [1, 3]
    assert Edges.chain(1).edges == ()


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(1, 0)], "edge 1 -> 0 does not run from a stage to a later one among the 3 stages"),
        ([(1, 1)], "edge 1 -> 1 does not run"),
        ([(1, 3)], "edge 1 -> 3 does not run"),
        ([(-1, 1)], "edge -1 -> 1 does not run"),
        ([(0, 1), (0, 1)], "edge 0 -> 1 is listed twice"),
    ],
)
def test_edges_that_make_no_sense_are_refused(edges, message):
    with pytest.raises(ScheduleError, match=message):
        Edges.of(3, edges)


def test_each_part_of_a_pair_is_an_action_and_any_other_action_is_its_own():
    pair = parse_action("(0F5;1B3)OVERLAP_F_B")

    assert [str(part) for part in pair.each] == ["0F5", "1B3"]
    assert parse_action("0F5").each == (parse_action("0F5"),)
