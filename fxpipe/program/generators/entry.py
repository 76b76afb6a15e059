"""Write a schedule down: its entry stands above the function that lists each rank's actions.

    @schedule("GPipe", ONE, what="All forwards, then all backwards.", when="...")
    def gpipe(placement, num_microbatches): ...

makes `gpipe(num_ranks, num_stages, num_microbatches)`, a `Program`. Sizes for which the
schedule is not defined are refused there with the nearest legal ones, all in the same words, so
that no schedule has to think about zero ranks or half a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Literal

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action
from fxpipe.program.program import Placement, Program

__all__ = ["ANY", "ENTRIES", "ONE", "SEVERAL", "TWO", "Generator", "ScheduleInfo", "schedule"]

Generator = Callable[[int, int, int], Program]
"""`(num_ranks, num_stages, num_microbatches) -> Program`."""

Orders = Callable[[Placement, int], Sequence[Sequence[Action]]]
"""The actions of each rank for a placement and a number of microbatches."""

StagesPerRank = tuple[int, int | None]
"""Least and greatest number of stages on a rank; None means no upper end."""

ONE: StagesPerRank = (1, 1)
TWO: StagesPerRank = (2, 2)
ANY: StagesPerRank = (1, None)
SEVERAL: StagesPerRank = (2, None)


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """What there is to know about a schedule before making a program of it.

    `stages_per_rank` is the least and the greatest number of stages on a rank;
    None means that there is no upper end. `splits_backward` says whether input
    and weight gradients are separate actions, `trains` whether there are backwards at all.
    """

    name: str
    aliases: tuple[str, ...]
    generator: Generator
    placement_style: Literal["loop", "v"]
    stages_per_rank: StagesPerRank
    splits_backward: bool
    description: str
    when_to_use: str
    trains: bool = True

    def __call__(self, num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
        """Make the program."""
        return self.generator(num_ranks, num_stages, num_microbatches)

    def placement(self, num_ranks: int, num_stages: int) -> Placement:
        """Where the schedule's programs place the stages."""
        make = Placement.loop if self.placement_style == "loop" else Placement.v
        return make(num_ranks, num_stages)

    def allows(self, stages_per_rank: int) -> bool:
        """Whether the schedule is defined for this number of stages on each rank."""
        least, most = self.stages_per_rank
        return stages_per_rank >= least and (most is None or stages_per_rank <= most)


ENTRIES: dict[Generator, ScheduleInfo] = {}
"""What was said about each generator."""


def schedule(
    name: str,
    stages: StagesPerRank,
    *aliases: str,
    what: str,
    when: str,
    style: Literal["loop", "v"] = "loop",
    splits: bool = False,
    trains: bool = True,
) -> Callable[[Orders], Generator]:
    """Make a generator of programs out of a function that lists the actions of each rank."""

    def make(orders: Orders) -> Generator:
        def generate(num_ranks: int, num_stages: int, num_microbatches: int) -> Program:
            info = ENTRIES[generate]
            _check_sizes(info, num_ranks, num_stages, num_microbatches)
            placement = info.placement(num_ranks, num_stages)
            ranks = orders(placement, num_microbatches)
            return Program.of(placement, num_microbatches, ranks, name=name)

        update_wrapper(generate, orders, ("__module__", "__name__", "__qualname__", "__doc__"))
        del generate.__wrapped__  # type: ignore[attr-defined]  # its signature is another one
        ENTRIES[generate] = ScheduleInfo(
            name, aliases, generate, style, stages, splits, what, when, trains
        )
        return generate

    return make


def _check_sizes(
    info: ScheduleInfo, num_ranks: int, num_stages: int, num_microbatches: int
) -> None:
    faults = []
    for what, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not _is_count(value):
            faults.append(f"{what} is {value!r}; the nearest legal number is {_nearest(value)}")
    if not _is_count(num_ranks):
        if not _is_count(num_stages):
            faults.append(f"num_stages is {num_stages!r}; it must be at least 1")
    elif (
        not _is_count(num_stages)
        or num_stages % num_ranks
        or not info.allows(num_stages // num_ranks)
    ):
        faults.append(_misfit(num_ranks, num_stages, info.stages_per_rank))
    if faults:
        raise ScheduleError(f"{info.name} is not defined for these sizes: " + "; ".join(faults))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _nearest(value: object) -> int:
    return max(1, round(value)) if isinstance(value, int | float) else 1


def _misfit(num_ranks: int, num_stages: int, allowed: StagesPerRank) -> str:
    least, most = allowed
    need = f"{least} or more stages on each rank, the same number everywhere"
    if most is not None:
        need = f"exactly {least} stage{'s' * (least > 1)} on each rank"
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
