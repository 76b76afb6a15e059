"""One queue per rank: what eager NCCL does, for all schedules, with and without skips."""

from graphlib import TopologicalSorter

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program import Edges, Program, find_faults, lower, reads, simulate, writes
from fxpipe.program.generators import SCHEDULES, forward_only_on
from fxpipe.program.program import Placement
from tests.program.oracle import finishes

SIZES = [(2, 3), (3, 7), (4, 4), (16, 5)]


def with_skips(num_stages):
    chain = {(s, s + 1) for s in range(num_stages - 1)}
    return Edges.of(num_stages, sorted(chain | {(s, s + 3) for s in range(0, num_stages - 3, 2)}))


def programs(num_ranks, num_microbatches):
    for info in SCHEDULES.values():
        for per_rank in (1, 2, 3):
            if info.allows(per_rank):
                yield info(num_ranks, num_ranks * per_rank, num_microbatches)
    yield forward_only_on(Placement.v(num_ranks, 2 * num_ranks), num_microbatches)


def have_one_order(program, edges):
    """Whether all ranks' messages are parts of one order; a cycle would be an error."""
    after = {}
    for actions in program.ranks:
        before = None
        for action in actions:
            if action.kind.is_transfer:
                (message,) = reads(action, edges) or writes(action, edges)
                after.setdefault(message, set()).update([] if before is None else [before])
                before = message
    return len(list(TopologicalSorter(after).static_order())) == len(after)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_early_receives_suit_one_queue_per_rank(num_ranks, num_microbatches):
    for program in programs(num_ranks, num_microbatches):
        for edges in (Edges.chain(program.num_stages), with_skips(program.num_stages)):
            lowered = lower(program, edges, streams="rank")

            assert have_one_order(lowered, edges), program.name


@pytest.mark.parametrize("receives", ["early", "late"])
def test_the_validator_agrees_with_literal_queues(receives):
    refused = 0
    for num_ranks in (2, 3, 4):
        for program in programs(num_ranks, num_ranks + 1):
            for edges in (Edges.chain(program.num_stages), with_skips(program.num_stages)):
                lowered = lower(program, edges, receives=receives)
                for streams in ("direction", "pair", "rank"):
                    sound = not find_faults(lowered, edges, streams=streams)

                    assert sound == finishes(lowered, edges, streams), (program.name, streams)
                    refused += not sound
    assert (refused > 0) == (receives != "early")


def test_late_receives_are_refused_where_they_would_hang():
    # On three ranks with two stages each, a late receive from one neighbour stands in the
    # queue before the send for which the other neighbour waits.
    program = SCHEDULES["Interleaved1F1B"](3, 6, 6)

    with pytest.raises(ScheduleError, match=r"one queue per rank.*use receives='early'"):
        lower(program, receives="late", streams="rank")
    lower(program, receives="late", streams="pair")


def test_a_rank_behind_its_one_queue_is_named():
    text = """\
        rank 0: 0F0 0SEND_F0 2RECV_F0 2F0
        rank 1: 1RECV_F0 1F0 1SEND_F0"""
    program = Program.parse(text)
    edges = Edges.of(3, [(0, 1), (1, 2)])

    assert find_faults(program, edges, streams="rank") == ()

    late = lower(SCHEDULES["Interleaved1F1B"](3, 6, 6), receives="late")
    faults = find_faults(late, streams="rank")

    assert faults and all(fault.kind.value == "stall" for fault in faults)


def test_one_queue_per_rank_costs_little_with_early_receives():
    program = SCHEDULES["ZBVZeroBubble"](4, 8, 12)
    lowered = lower(program)

    by_direction = simulate(lowered, streams="direction").makespan
    by_rank = simulate(lowered, streams="rank").makespan

    assert by_direction <= by_rank <= 1.03 * by_direction
