"""Read a memory limit: one number for all ranks, one for each, or none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.errors import PlanError
from fxpipe.program import Program

__all__ = ["MemoryLimit", "limits_of"]

MemoryLimit = float | Sequence[float] | None


def limits_of(program: Program, limit: MemoryLimit) -> tuple[float, ...]:
    """The limit of each rank; infinite where there is none.

    Raises:
        PlanError: the limit has another number of entries than there are ranks.
    """
    if limit is None:
        return (math.inf,) * program.num_ranks
    if isinstance(limit, int | float):
        return (float(limit),) * program.num_ranks
    if len(limit) != program.num_ranks:
        raise PlanError(
            f"the memory limit has {len(limit)} entries, but the program has "
            f"{program.num_ranks} ranks; give one number, or one per rank"
        )
    return tuple(map(float, limit))
