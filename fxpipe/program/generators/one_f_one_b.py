"""Schedules that alternate one forward with one backward.

After a warm-up of forwards each rank does a backward for every forward, so the
number of live microbatches stays at about the number of ranks, however many
microbatches there are. `interleaved_orders` is shared with the zero-bubble
schedules, which follow the same order with split backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.entry import ANY, ONE, schedule
from fxpipe.program.program import Placement

__all__ = ["interleaved_one_f_one_b", "interleaved_orders", "one_f_one_b", "round_sizes"]


@schedule(
    "1F1B", ONE, "OneFOneB", "PipeDreamFlush",
    what="After a warm-up, one forward and one backward in turn.",
    when="The default with one stage per rank: little memory, few messages.",
)  # fmt: skip
def one_f_one_b(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Fill the pipeline, then alternate one forward and one backward.

    Three ranks, four microbatches:

        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    As idle as GPipe, (p - 1) / (m + p - 1) of the time for p ranks and m
    microbatches, but rank r holds at most p - r residuals.
    """
    return _alternating(placement, num_microbatches)


@schedule(
    "Interleaved1F1B", ANY, "InterleavedOneFOneB", "VPP",
    what="1F1B over several stages per rank, which divides the waiting by their number.",
    when="Several stages per rank and a backward that cannot be split.",
)  # fmt: skip
def interleaved_one_f_one_b(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Alternate forwards and backwards over several stages per rank.

    Two ranks, four stages, four microbatches:

        rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    With p ranks, m >= p microbatches and v stages per rank, (p - 1) / (m v + p - 1)
    of the time is idle: v times less waiting than 1F1B for v times the messages.
    Microbatches pass a rank's stages in rounds of g, where p <= g < 2 p and g = p
    when m is a multiple of p; a rank holds at most ((v - 1) g + 2 p - 1) / v
    microbatches of its layers. With one stage per rank it is 1F1B.
    """
    return _alternating(placement, num_microbatches)


def _alternating(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    # A rank's first backward comes back after a forward and a backward on each
    # later rank. With one stage per rank the forwards of that time would only pile
    # up; with several, a second forward per later rank keeps the rank busy.
    per_later_rank = 1 if placement.num_stages == placement.num_ranks else 2
    return interleaved_orders(placement, num_microbatches, Kind.BACKWARD, ahead=per_later_rank)


def interleaved_orders(
    placement: Placement, num_microbatches: int, backward: Kind, *, ahead: int
) -> list[list[Action]]:
    """Each rank's forwards and backwards: warm-up, alternation, cool-down.

    `ahead` is how many forwards a rank runs for each later rank before its first pair,
    beyond those that bring the first round to the rank's last stage.
    """
    sizes, last = round_sizes(placement.num_ranks, num_microbatches), placement.num_ranks - 1
    return [
        _order(placement.stages_of(rank), sizes, backward, ahead * (last - rank))
        for rank in range(placement.num_ranks)
    ]


def _order(stages: Sequence[int], sizes: Sequence[int], backward: Kind, ahead: int) -> list[Action]:
    forwards, backwards = [], []
    start = 0
    for size in sizes:
        microbatches = range(start, start + size)
        forwards += [Action(Kind.FORWARD, s, m) for s in stages for m in microbatches]
        backwards += [Action(backward, s, m) for s in reversed(stages) for m in microbatches]
        start += size
    warm_up = min(len(forwards), (len(stages) - 1) * sizes[0] + ahead)
    order = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return order + backwards[len(forwards) - warm_up :]


def round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Split the microbatches into rounds of at least num_ranks, as even as can be.

    A round of that length comes back to a rank for its next stage just as the
    rank has finished it with the one before. Larger rounds come first.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    size, rest = divmod(num_microbatches, num_rounds)
    return [size + 1] * rest + [size] * (num_rounds - rest)
