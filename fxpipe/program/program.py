"""A schedule as data: which rank does what, in which order.

A `Placement` maps stages to ranks. A `Program` is a placement and one tuple of
actions per rank. A compute-only program holds forwards and backwards; a lowered
one (see `lower`) also holds transfers and parameter handling. Programs are
values: passes return new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Kind

__all__ = ["Placement", "Program"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which stage: `stage_to_rank[stage] == rank`."""

    num_ranks: int
    stage_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ScheduleError(f"a placement needs at least one rank, got {self.num_ranks}")
        bad = [(s, r) for s, r in enumerate(self.stage_to_rank) if not 0 <= r < self.num_ranks]
        if bad:
            raise ScheduleError(
                f"ranks go from 0 to {self.num_ranks - 1}, but "
                + ", ".join(f"stage {s} is on rank {r}" for s, r in bad)
            )
        idle = sorted(set(range(self.num_ranks)) - set(self.stage_to_rank))
        if idle:
            raise ScheduleError(f"no stage is placed on ranks {idle}")

    @staticmethod
    def loop(num_ranks: int, num_stages: int) -> Placement:
        """Stage s on rank s mod num_ranks: rank r holds r, r + R, r + 2R, ..."""
        return Placement(num_ranks, tuple(s % num_ranks for s in range(num_stages)))

    @staticmethod
    def v(num_ranks: int, num_stages: int) -> Placement:
        """Down the ranks and up again, over and over: 0 1 2 2 1 0 0 1 2 ..."""
        period = (*range(num_ranks), *reversed(range(num_ranks)))
        return Placement(num_ranks, tuple(period[s % len(period)] for s in range(num_stages)))

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in increasing order."""
        return tuple(s for s, r in enumerate(self.stage_to_rank) if r == rank)


@dataclass(frozen=True)
class Program:
    """One tuple of actions per rank.

    `str(program)` is the table that people read:

        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """

    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    name: str = ""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ScheduleError(f"a program needs a microbatch, got {self.num_microbatches}")
        if len(self.ranks) != self.placement.num_ranks:
            raise ScheduleError(
                f"the placement has {self.placement.num_ranks} ranks, "
                f"the program lists actions for {len(self.ranks)}"
            )

    @staticmethod
    def of(
        placement: Placement,
        num_microbatches: int,
        ranks: Sequence[Iterable[Action]],
        *,
        name: str = "",
    ) -> Program:
        return Program(placement, num_microbatches, tuple(tuple(r) for r in ranks), name)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def is_lowered(self) -> bool:
        """Whether the program holds more than compute."""
        return any(
            not action.kind.is_compute and action.kind is not Kind.OVERLAP
            for actions in self.ranks
            for action in actions
        )

    def __str__(self) -> str:
        width = len(str(self.num_ranks - 1))
        return "\n".join(
            f"rank {rank:>{width}}: {' '.join(map(str, actions))}".rstrip()
            for rank, actions in enumerate(self.ranks)
        )
