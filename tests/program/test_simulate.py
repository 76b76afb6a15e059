"""The simulator gives the figures of the literature and, by hand, of small cases."""

import random
from itertools import pairwise

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import (
    Edges,
    Kind,
    Link,
    Placement,
    Program,
    StageCost,
    StageCosts,
    ValueKind,
    lower,
    reads,
    simulate,
    writes,
)
from fxpipe.program.generators import get_schedule
from tests.program.grid import LOWERINGS, programs

ONE_F_ONE_B = Program.parse("""
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
""")


def spans(timeline, *, rank=None, transfers=False) -> str:
    """The spans as text: `0F0@0-1`."""
    return " ".join(
        f"{span.action}@{span.start:g}-{span.end:g}"
        for span in timeline.spans
        if (rank is None or span.rank == rank) and (transfers or not span.action.kind.is_transfer)
    )


def test_actions_start_as_soon_as_they_can():
    timeline = simulate(ONE_F_ONE_B)

    assert spans(timeline, rank=0) == "0F0@0-1 0F1@1-2 0B0@4-6 0B1@7-9"
    assert spans(timeline, rank=1) == "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7"
    assert timeline.makespan == 9
    assert timeline.busy == (6, 6)
    assert timeline.idle == pytest.approx(1 / 3)
    assert timeline.extent == ((0, 9), (1, 7))
    assert timeline.idle_per_rank == pytest.approx((1 / 3, 1 / 3))
    assert timeline.idle_in_span_per_rank == pytest.approx((1 / 3, 0))
    assert timeline.idle_in_span == pytest.approx(1 / 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8, 9])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_idle_is_as_the_formula_says_before_and_after_lowering(name, num_ranks, num_microbatches):
    program = get_schedule(name)(num_ranks, num_ranks, num_microbatches)

    for timeline in (simulate(program), simulate(lower(program))):
        assert timeline.idle == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "idle", "peak"),
    [
        ("GPipe", 1, 3 / 11, 8),
        ("1F1B", 1, 3 / 11, 4),
        ("Interleaved1F1B", 2, 3 / 19, 5.5),
        ("ZBVZeroBubble", 2, 1.5 / 25.5, 4),
    ],
)
def test_the_table_for_four_ranks_and_eight_microbatches(name, stages_per_rank, idle, peak):
    timeline = simulate(get_schedule(name)(4, 4 * stages_per_rank, 8))

    assert timeline.idle == pytest.approx(idle)
    assert max(timeline.peak_memory) == pytest.approx(peak)


def test_a_compute_only_program_pays_for_its_transfers_one_by_one():
    costs = StageCosts.uniform(ONE_F_ONE_B.placement, link=Link(0.25, 4.0), activation=1.0)

    timeline = simulate(ONE_F_ONE_B, costs)

    assert spans(timeline, rank=0) == "0F0@0-1 0F1@1-2 0B0@5-7 0B1@8-10"
    assert spans(timeline, rank=1) == "1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5.5 1B1@5.5-7.5"


def test_a_lowered_program_shows_its_transfers():
    costs = StageCosts.uniform(ONE_F_ONE_B.placement, link=Link(0.5))

    timeline = simulate(lower(ONE_F_ONE_B), costs)

    assert spans(timeline, rank=1, transfers=True) == (
        "1RECV_F0@1-1.5 1F0@1.5-2.5 1RECV_F1@2-2.5 1B0@2.5-4.5 1SEND_B0@4.5-5 1F1@4.5-5.5 "
        "1B1@5.5-7.5 1SEND_B1@7.5-8"
    )
    assert timeline.makespan == 10


def test_links_may_differ_by_direction_and_edges_by_size():
    costs = StageCosts(
        (StageCost(), StageCost()),
        activations={(0, 1): 3.0},
        gradients={(0, 1): 2.0},
        links={(0, 1): Link(0.0, 1.0), (1, 0): Link(1.0, 2.0)},
    )
    program = Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")

    timeline = simulate(lower(program), costs)

    assert spans(timeline, transfers=True) == (
        "0F0@0-1 0SEND_F0@1-4 1RECV_F0@1-4 1F0@4-5 1B0@5-7 0RECV_B0@7-9 1SEND_B0@7-9 0B0@9-11"
    )


def test_a_message_waits_for_those_before_it_on_its_stream():
    # Rank 0 has 0F1 at 2, but the pair's next message is the gradient that rank 1 has at
    # 4, and only then rank 1 receives. With a stream for each direction nothing is in the way.
    program = Program.parse("""
        rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)
    eager = Program.parse(str(program).replace("1B0 1SEND_B0 1RECV_F1", "1RECV_F1 1B0 1SEND_B0"))

    assert "0SEND_F1@4-4" in spans(simulate(program), transfers=True)
    assert "0SEND_F1@2-2" in spans(simulate(eager, streams="direction"), transfers=True)
    with pytest.raises(ScheduleError, match="message order"):
        simulate(eager)


def test_activations_and_gradients_do_not_wait_for_each_other():
    # They have a communicator each. The gradient used to wait for the second activation, until 12.
    program = Program.parse("""
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """)
    costs = StageCosts.uniform(program.placement, link=Link(latency=4.0))

    for streams in ("pair", "rank"):
        shown = spans(simulate(program, costs, streams=streams), transfers=True)
        assert "0SEND_F1@8-12" in shown
        assert "0RECV_B0@11-15" in shown


def test_a_message_leaves_when_its_sender_knows_that_it_is_awaited():
    # That takes the latency of the link, too. Between two hosts a step was predicted to take 0.43 s
    # in place of 0.71.
    program = Program.parse("""
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1
        rank 1: 1RECV_F0 1F0 1RECV_F1 1F1
    """)
    costs = StageCosts.uniform(program.placement, link=Link(latency=3.0))

    timeline = simulate(program, costs)

    assert spans(timeline, rank=1, transfers=True) == (
        "1RECV_F0@3-6 1F0@6-7 1RECV_F1@10-13 1F1@13-14"
    )


def test_transfers_that_do_not_overlap_hold_both_ranks():
    costs = StageCosts.uniform(ONE_F_ONE_B.placement, link=Link(0.5), overlaps_transfers=False)

    for program in (ONE_F_ONE_B, lower(ONE_F_ONE_B, fuse=False, costs=costs)):
        timeline = simulate(program, costs)
        assert spans(timeline, rank=0, transfers=True) == (
            "0F0@0-1 0SEND_F0@1-1.5 0F1@1.5-2.5 0SEND_F1@2.5-3 0RECV_B0@5-5.5 0B0@5.5-7.5 "
            "0RECV_B1@8.5-9 0B1@9-11"
        )
        assert spans(timeline, rank=1, transfers=True) == (
            "1RECV_F0@1-1.5 1F0@1.5-2.5 1RECV_F1@2.5-3 1B0@3-5 1SEND_B0@5-5.5 1F1@5.5-6.5 "
            "1B1@6.5-8.5 1SEND_B1@8.5-9"
        )


def test_unsharding_and_reducing_take_time_beside_the_compute():
    stage = StageCost(unshard=2.0, reduce_grad=3.0, parameters=10.0)
    costs = StageCosts((stage, stage))
    program = Program.parse("rank 0: 0F0 1F0 1B0 0B0")

    timeline = simulate(lower(program, reduce_grad=True, max_unsharded=2), costs)

    assert spans(timeline) == (
        "0UNSHARD@0-2 0F0@2-3 1UNSHARD@2-4 1F0@4-5 1B0@5-7 1RESHARD@7-7 0B0@7-9 "
        "1REDUCE_GRAD@7-10 0RESHARD@9-9 0REDUCE_GRAD@10-13"
    )
    assert timeline.makespan == 13
    assert timeline.peak_memory == (20,)


def test_without_overlap_unsharding_and_reducing_hold_the_rank():
    stage = StageCost(unshard=2.0, reduce_grad=3.0)
    costs = StageCosts((stage, stage), overlaps_transfers=False)
    program = Program.parse("rank 0: 0F0 1F0 1B0 0B0")

    timeline = simulate(lower(program, reduce_grad=True, max_unsharded=2), costs)

    assert spans(timeline) == (
        "0UNSHARD@0-2 1UNSHARD@2-4 0F0@4-5 1F0@5-6 1B0@6-8 1REDUCE_GRAD@8-11 1RESHARD@11-11 "
        "0B0@11-13 0REDUCE_GRAD@13-16 0RESHARD@16-16"
    )


@pytest.mark.parametrize(("saving", "end"), [(0.0, 4.0), (0.5, 3.5), (1.0, 3.0)])
def test_a_pair_takes_its_parts_in_turn_less_what_overlaps(saving, end):
    program = Program.parse("rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    costs = StageCosts.uniform(program.placement, pair_saving=saving)

    timeline = simulate(program, costs)

    assert [span.end for span in timeline.spans] == [1, end, end + 2]


def test_memory_follows_the_lifetimes_of_values():
    costs = StageCosts(
        (StageCost(residual=8.0, deferred=2.0), StageCost(residual=8.0)), activation=1.0
    )
    program = Program.parse("rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1B0")

    timeline = simulate(program, costs)

    # 0F0 makes residual and activation, which goes at its end; the gradient comes at 4;
    # 0I0 frees residual and gradient and leaves deferred work, which 0W0 frees.
    assert timeline.memory[0] == ((0, 9), (1, 8), (4, 9), (5, 2), (6, 0))
    # 1F0 frees the activation; 1B0 makes the gradient, which goes at its end.
    assert timeline.memory[1] == ((1, 9), (4, 0))
    assert timeline.peak_memory == (9, 9)


def test_a_receive_holds_its_buffer_from_the_moment_it_is_posted():
    costs = StageCosts((StageCost(), StageCost()), activation=1.0, link=Link(0.5))
    program = Program.parse("rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0")

    timeline = simulate(program, costs)

    assert timeline.memory[0] == ((0, 1), (1.5, 0))
    assert timeline.memory[1] == ((0, 1), (2.5, 0))


def test_weight_gradients_are_one_buffer_per_stage():
    program = Program.parse("rank 0: 0F0 0F1 0B0 0B1")
    costs = StageCosts((StageCost(residual=1.0, weight_grad=5.0),))

    timeline = simulate(program, costs)

    assert timeline.peak_memory == (7,)
    assert timeline.memory[0][-1] == (6, 5)


def test_evaluation_keeps_no_residuals():
    program = Program.parse("rank 0: 0F0 0F1 0F2\nrank 1: 1F0 1F1 1F2")

    assert simulate(program).peak_memory == (1, 1)


@pytest.mark.parametrize("name", programs())
def test_timelines_keep_all_the_rules(name):
    program = programs()[name]
    edges = Edges.chain(program.num_stages)
    rank_of = program.placement.stage_to_rank
    chance = random.Random(name)
    stages = tuple(
        StageCost(*(chance.uniform(0.5, 2) for _ in range(3)), residual=1.0)
        for _ in range(program.num_stages)
    )
    for overlaps in (True, False):
        costs = StageCosts(stages, activation=1.0, link=Link(0.1, 5.0), overlaps_transfers=overlaps)
        for one in (program, *(lower(program, **options) for options in LOWERINGS.values())):
            timeline = simulate(one, costs)

            check_ranks_do_one_thing_at_a_time(timeline, overlaps)
            check_values_are_there_when_read(timeline, edges, rank_of, 0.3)
            check_the_critical_path(timeline)
            expected = sum(
                costs.compute(part.kind, part.stage)
                for actions in one.ranks
                for action in actions
                for part in action.parts or (action,)
                if part.kind.is_compute
            )
            assert sum(timeline.busy) == pytest.approx(expected)
            for curve in timeline.memory:
                assert min(held for _, held in curve) > -1e-9
                assert curve[-1][1] == pytest.approx(0)


def check_ranks_do_one_thing_at_a_time(timeline, overlaps) -> None:
    for rank in range(timeline.num_ranks):
        end = 0.0
        for span in timeline.of_rank(rank):
            if span.is_compute or (not overlaps and span.end > span.start):
                assert span.start >= end - 1e-9
                end = span.end


def check_values_are_there_when_read(timeline, edges, rank_of, transfer_time) -> None:
    made = {}
    for span in timeline.spans:
        if span.is_compute:
            made.update((value, span.end) for value in writes(span.action, edges))
    for span in timeline.spans:
        if span.is_compute:
            for value in reads(span.action, edges):
                crosses = rank_of[value.stage] != rank_of[value.peer]
                ready = made[value] + (transfer_time if crosses else 0)
                assert span.start >= ready - 1e-9


def check_the_critical_path(timeline) -> None:
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for before, after in pairwise(path):
        assert after.start >= before.end - 1e-9


def test_the_critical_path_of_a_tight_pipeline_has_no_gaps():
    timeline = simulate(ONE_F_ONE_B)

    assert [str(span.action) for span in timeline.critical_path] == [
        "0F0",
        "1F0",
        "1B0",
        "1F1",
        "1B1",
        "0B1",
    ]


def test_an_unsound_program_is_not_simulated():
    with pytest.raises(ScheduleError, match="1F0: missing"):
        simulate(Program.parse("rank 0: 0F0", placement=Placement(1, (0, 0))))


def test_costs_that_make_no_sense_are_refused():
    with pytest.raises(ScheduleError, match="the cost forward must be at least 0, got -1"):
        StageCost(forward=-1)
    with pytest.raises(ScheduleError, match="must be at least 0, got nan"):
        StageCost(residual=float("nan"))
    with pytest.raises(ScheduleError, match=r"bandwidth above 0, got latency 0\.0 and 0 bytes"):
        Link(bytes_per_time=0)
    with pytest.raises(ScheduleError, match="pair_saving is a share from 0 to 1, got 2"):
        StageCosts((StageCost(),), pair_saving=2)
    with pytest.raises(ScheduleError, match="costs are for 1 stages, the program has stage 1"):
        simulate(ONE_F_ONE_B, StageCosts((StageCost(),)))


def test_costs_answer_for_every_kind():
    costs = StageCosts(
        (StageCost(1, 2, 3, unshard=4, reduce_grad=5, residual=6, weight_grad=7, parameters=8),)
    )

    assert [costs.compute(kind, 0) for kind in Kind if kind.is_compute] == [1, 5, 2, 3]
    assert (costs.unshard(0), costs.reduce_grad(0), costs.unsharded_bytes(0)) == (4, 5, 8)
    assert [costs.value_bytes(kind, 0, 0) for kind in ValueKind] == [0, 0, 6, 6, 7, 0]
    assert StageCosts((StageCost(1, 2, 3, backward=4),)).compute(Kind.BACKWARD, 0) == 4
