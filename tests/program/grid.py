"""Small programs of every schedule, and every way to lower them, for tests over a grid."""

from functools import cache

from fxpipe.errors import ScheduleError
from fxpipe.program import Program
from fxpipe.program.generators import SCHEDULES

SIZES = ((1, 1, 1), (1, 2, 3), (2, 1, 1), (2, 2, 5), (3, 1, 4), (3, 2, 7), (4, 3, 6), (4, 2, 2))
"""Ranks, stages per rank, microbatches."""

LOWERINGS = {
    "early": {},
    "unfused": {"fuse": False},
    "late": {"receives": "late"},
    "full": {"reduce_grad": True, "max_unsharded": 2},
    "late full": {"receives": "late", "fuse": False, "reduce_grad": True, "max_unsharded": 2},
}


@cache
def programs() -> dict[str, Program]:
    """Every schedule at every size for which it is defined, by a readable name."""
    found = {}
    for name, schedule in SCHEDULES.items():
        for num_ranks, stages_per_rank, num_microbatches in SIZES:
            try:
                program = schedule(num_ranks, num_ranks * stages_per_rank, num_microbatches)
            except ScheduleError:
                continue
            found[f"{name}-{num_ranks}x{stages_per_rank}-{num_microbatches}"] = program
    assert len(found) >= 3 * len(SCHEDULES)
    return found
