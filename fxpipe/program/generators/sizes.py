"""Refuse sizes that a schedule is not defined for, and name the nearest legal ones.

Every generator calls `check_sizes` first, so all of them say no in the same
words and none of them has to think about zero ranks or half a stage.
"""

from __future__ import annotations

from fxpipe.errors import ScheduleError

__all__ = ["ANY", "ONE", "SEVERAL", "TWO", "StagesPerRank", "check_sizes"]

StagesPerRank = tuple[int, int | None]
"""Least and greatest number of stages on a rank; None means no upper end."""

ONE: StagesPerRank = (1, 1)
TWO: StagesPerRank = (2, 2)
ANY: StagesPerRank = (1, None)
SEVERAL: StagesPerRank = (2, None)


def check_sizes(
    schedule: str,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    *,
    allowed: StagesPerRank,
) -> int:
    """Return the number of stages per rank.

    Raises:
        ScheduleError: a count is not a positive integer, or the stages do not
            spread over the ranks as the schedule needs; all faults together.
    """
    faults = []
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not _is_count(value):
            faults.append(f"{name} is {value!r}; the nearest legal number is {_nearest(value)}")
    if not _is_count(num_ranks):
        if not _is_count(num_stages):
            faults.append(f"num_stages is {num_stages!r}; it must be at least 1")
    elif not _is_count(num_stages) or not _fits(num_ranks, num_stages, allowed):
        faults.append(_misfit(num_ranks, num_stages, allowed))
    if faults:
        raise ScheduleError(f"{schedule} is not defined for these sizes: " + "; ".join(faults))
    return num_stages // num_ranks


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _nearest(value: object) -> int:
    return max(1, round(value)) if isinstance(value, int | float) else 1


def _fits(num_ranks: int, num_stages: int, allowed: StagesPerRank) -> bool:
    least, most = allowed
    per_rank, rest = divmod(num_stages, num_ranks)
    return rest == 0 and per_rank >= least and (most is None or per_rank <= most)


def _misfit(num_ranks: int, num_stages: int, allowed: StagesPerRank) -> str:
    least, most = allowed
    if most is None:
        need = f"{least} or more stages on each rank, the same number everywhere"
    elif least == most:
        need = f"exactly {least} stage{'s' * (least > 1)} on each rank"
    else:
        need = f"{least} to {most} stages on each rank, the same number everywhere"
    below = _nearest(num_stages) // num_ranks
    near = [
        n * num_ranks
        for n in (below, below + 1)
        if n >= least and (most is None or n <= most) and n * num_ranks != num_stages
    ] or [(least if below < least or most is None else most) * num_ranks]
    return (
        f"it needs {need}, got {num_stages!r} stages on {num_ranks} ranks; the nearest legal "
        f"number of stages on {num_ranks} ranks is {' or '.join(map(str, near))}"
    )
