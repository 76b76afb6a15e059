"""The simulator gives the figures of the literature, by hand-checked small cases."""

import pytest

from fxpipe.program import Action, Kind, Placement, Program, lower, simulate


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Program:
    ranks = []
    for rank in range(num_ranks):
        warmup = min(num_microbatches, num_ranks - rank - 1)
        actions = [Action(Kind.FORWARD, rank, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            actions += [Action(Kind.FORWARD, rank, warmup + m), Action(Kind.BACKWARD, rank, m)]
        actions += [
            Action(Kind.BACKWARD, rank, m)
            for m in range(num_microbatches - warmup, num_microbatches)
        ]
        ranks.append(actions)
    return Program.of(Placement.loop(num_ranks, num_ranks), num_microbatches, ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8, 9])
def test_one_f_one_b_is_idle_as_the_formula_says(num_ranks, num_microbatches):
    program = one_f_one_b(num_ranks, num_microbatches)

    for timeline in (simulate(program), simulate(lower(program))):
        share = (num_ranks - 1) / (num_microbatches + num_ranks - 1)
        assert timeline.idle == pytest.approx(share)
        assert max(timeline.peak_memory) == pytest.approx(min(num_ranks, num_microbatches))
