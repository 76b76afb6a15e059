"""Schedules that alternate one forward with one backward.

After a warm-up of forwards each rank does a backward for every forward, so the
number of live microbatches stays at about the number of ranks, however many
microbatches there are. `interleaved_order` is shared with the zero-bubble
schedules, which follow the same order with split backwards.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind
from fxpipe.program.generators.sizes import ANY, ONE, check_sizes
from fxpipe.program.program import Placement, Program

__all__ = ["interleaved_one_f_one_b", "interleaved_order", "one_f_one_b", "round_sizes"]


def one_f_one_b(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Fill the pipeline, then alternate one forward and one backward.

    Three ranks, four microbatches:

        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    As idle as GPipe, (p - 1) / (m + p - 1) of the time for p ranks and m
    microbatches, but rank r holds at most p - r residuals.

    Raises:
        ScheduleError: not one stage per rank, or a count below one.
    """
    check_sizes("1F1B", num_ranks, num_stages, num_microbatches, allowed=ONE)
    return _alternating(num_ranks, num_stages, num_microbatches, "1F1B")


def interleaved_one_f_one_b(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
    """Alternate forwards and backwards over several stages per rank.

    Two ranks, four stages, four microbatches:

        rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    With p ranks, m >= p microbatches and v stages per rank, (p - 1) / (m v + p - 1)
    of the time is idle: v times less waiting than 1F1B for v times the messages.
    Microbatches pass a rank's stages in rounds of g, where p <= g < 2 p and g = p
    when m is a multiple of p; a rank holds at most ((v - 1) g + 2 p - 1) / v
    microbatches of its layers. With one stage per rank it is 1F1B.

    Raises:
        ScheduleError: the stages do not spread evenly, or a count below one.
    """
    check_sizes("Interleaved1F1B", num_ranks, num_stages, num_microbatches, allowed=ANY)
    return _alternating(num_ranks, num_stages, num_microbatches, "Interleaved1F1B")


def _alternating(num_ranks: int, num_stages: int, num_microbatches: int, name: str) -> Program:
    # A rank's first backward comes back after a forward and a backward on each
    # later rank. With one stage per rank the forwards of that time would only pile
    # up; with several, a second forward per later rank keeps the rank busy.
    per_later_rank = 1 if num_stages == num_ranks else 2
    ranks = [
        interleaved_order(
            rank,
            num_ranks,
            num_stages,
            num_microbatches,
            backward=Kind.BACKWARD,
            ahead=per_later_rank * (num_ranks - 1 - rank),
        )
        for rank in range(num_ranks)
    ]
    return Program.of(Placement.loop(num_ranks, num_stages), num_microbatches, ranks, name=name)


def interleaved_order(
    rank: int,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    *,
    backward: Kind,
    ahead: int,
) -> list[Action]:
    """The rank's forwards and backwards: warm-up, alternation, cool-down.

    `ahead` is how many forwards the rank runs before its first pair, beyond those
    that bring the first round to the rank's last stage.
    """
    stages = range(rank, num_stages, num_ranks)
    forwards, backwards = [], []
    start = 0
    sizes = round_sizes(num_ranks, num_microbatches)
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
