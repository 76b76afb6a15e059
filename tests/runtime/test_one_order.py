"""All messages of a step, those around the program too, are parts of one order on all ranks."""

import random

import pytest
import torch
from torch import nn

from fxpipe.program import Edges, Program, lower, validate
from fxpipe.program.generators import SCHEDULES, forward_only_on
from fxpipe.program.program import Placement
from fxpipe.runtime.parameters.tied import TiedGroup
from tests.backends.one_order import Posted, left_in_queues


def random_edges(num_stages: int, chance: random.Random) -> Edges:
    chain = {(s, s + 1) for s in range(num_stages - 1)}
    pairs = [(s, t) for s in range(num_stages) for t in range(s + 2, num_stages)]
    return Edges.of(num_stages, sorted(chain | set(chance.sample(pairs, min(3, len(pairs))))))


def random_ties(program: Program, chance: random.Random) -> list[TiedGroup]:
    """Groups with owners on any rank: those of two groups may lie crosswise."""
    tied = []
    for _ in range(chance.randrange(4)):
        ranks = chance.sample(range(program.num_ranks), chance.randint(1, program.num_ranks))
        tied.append(TiedGroup("w", tuple(ranks), {ranks[0]: (nn.Parameter(torch.zeros(1)),)}))
    return tied


def messages_of(
    rank: int,
    program: Program,
    routes: list[tuple[int, int]],
    tied: list[TiedGroup],
) -> list[Posted]:
    rank_of = program.placement.stage_to_rank
    ends = [*routes, *(pair for group in tied for pair in group.messages)]
    around: list[Posted] = [
        (0, source == rank, target if source == rank else source)
        for source, target in ends
        if rank in (source, target)
    ]
    before = sum(rank in route for route in routes)
    inside: list[Posted] = [
        ("B" in action.kind.text, action.kind.is_send, rank_of[action.peer])
        for action in program.ranks[rank]
        if action.kind.is_transfer and action.peer is not None
    ]
    return [*around[:before], *inside, *around[before:]]


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 5), (3, 4), (4, 6), (8, 3), (16, 4)])
def test_ties_and_routes_stay_in_the_order_of_the_program(num_ranks: int, count: int) -> None:
    chance = random.Random(num_ranks)
    programs = [forward_only_on(Placement.v(num_ranks, 2 * num_ranks), count)]
    for info in SCHEDULES.values():
        sizes = [n for n in (1, 2, 3) if info.allows(n)]
        programs += [info(num_ranks, num_ranks * n, count) for n in sizes]
    for program in programs:
        edges = random_edges(program.num_stages, chance)
        lowered = lower(program, edges, streams="rank")
        validate(lowered, edges, streams="rank")
        tied = random_ties(program, chance)
        pairs = [(s, t) for s in range(num_ranks) for t in range(num_ranks) if s != t]
        routes = chance.sample(pairs, chance.randint(0, min(4, len(pairs))))

        posted = [messages_of(rank, lowered, routes, tied) for rank in range(num_ranks)]

        assert not left_in_queues(posted), program.name


def test_messages_that_cross_are_left_in_their_queues() -> None:
    crossing: list[list[Posted]] = [[(0, True, 1), (0, False, 1)], [(0, True, 0), (0, False, 0)]]

    assert left_in_queues(crossing) == [(0, 0, 1, 0), (0, 1, 0, 0)]
    assert not left_in_queues([crossing[0], crossing[1][::-1]])
