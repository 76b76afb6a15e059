"""A schedule as data: which rank does what, in which order.

A `Placement` maps stages to ranks. A `Program` is a placement and one tuple of
actions per rank. A compute-only program holds forwards and backwards; a lowered
one (see `lower`) also holds transfers and parameter handling. Programs are
values: passes return new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action
from fxpipe.program.formats.text import (
    parse_rows,
    read_json,
    rows_of_csv,
    rows_of_table,
    write_csv,
    write_json,
)

__all__ = ["Placement", "Program", "Step"]


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

    @cached_property
    def is_lowered(self) -> bool:
        """Whether the program holds more than compute."""
        return any(
            not (action.kind.is_compute or action.parts)
            for actions in self.ranks
            for action in actions
        )

    @cached_property
    def has_backward(self) -> bool:
        """Whether the program computes gradients; otherwise it is an evaluation."""
        return any(
            part.kind.is_backward
            for actions in self.ranks
            for action in actions
            for part in action.each
        )

    @staticmethod
    def parse(
        text: str,
        *,
        placement: Placement | None = None,
        num_microbatches: int | None = None,
        name: str = "",
    ) -> Program:
        """The inverse of `str(program)`; see `from_csv` for what is inferred and refused."""
        rows = rows_of_table(text)
        return _program_of(parse_rows(rows), placement, num_microbatches, name)

    @staticmethod
    def from_csv(
        text: str,
        *,
        placement: Placement | None = None,
        num_microbatches: int | None = None,
        name: str = "",
    ) -> Program:
        """Read a CSV: one row per rank, one cell per action, empty cells for idle steps.

        Reads what torch writes, compute-only and with transfers. A stage is placed on the
        rank that computes it and microbatches are counted, unless they are given. The
        program is read, not judged: call `validate` next.

        Raises:
            ScheduleError: lists each cell that cannot be read by row, column and what was
                expected; or stages and microbatches are not numbered 0, 1, 2, ...
        """
        rows = rows_of_csv(text)
        return _program_of(parse_rows(rows), placement, num_microbatches, name)

    def to_csv(self, *, idle: bool = False) -> str:
        """One row per rank, one cell per action, as torch reads it.

        With `idle` there is one column per step, in which each rank does at most one
        action, and a cell is empty where a rank waits; for compute-only programs on a
        chain of stages.

        Raises:
            ScheduleError: `idle` is asked for and the program is lowered or gets stuck.
        """
        if not idle:
            return write_csv([[str(action) for action in actions] for actions in self.ranks])
        # The table of steps comes from a walk, which is built upon this module.
        from fxpipe.program.play.walk import step_table

        return write_csv(
            [["" if action is None else str(action) for action in row] for row in step_table(self)]
        )

    @staticmethod
    def from_json(text: str) -> Program:
        """The inverse of `to_json`.

        Raises:
            ScheduleError: the text is not JSON, a key is missing, unknown or of the wrong
                type, or a cell cannot be read.
        """
        found = read_json(text)
        placement = Placement(len(found["ranks"]), tuple(found["stage_to_rank"]))
        ranks = parse_rows(found["ranks"])
        return Program.of(placement, found["num_microbatches"], ranks, name=found["name"])

    def to_json(self) -> str:
        """All of the program, one line per rank, for files and for other tools."""
        fields = {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            "stage_to_rank": self.placement.stage_to_rank,
        }
        return write_json(fields, [[str(action) for action in actions] for actions in self.ranks])

    def __str__(self) -> str:
        width = len(str(self.num_ranks - 1))
        return "\n".join(
            f"rank {rank:>{width}}: {' '.join(map(str, actions))}".rstrip()
            for rank, actions in enumerate(self.ranks)
        )

    def draw(self, path: str | PathLike[str], **options: Any) -> Path:
        """Simulate the program and draw its timeline; see `fxpipe.viz.draw_program`."""
        from fxpipe.viz.timeline import draw_program

        return draw_program(self, path, **options)

    def _repr_svg_(self) -> str | None:
        from fxpipe.viz.timeline import program_svg

        return program_svg(self)


class Step(NamedTuple):
    """An action and its place in a program."""

    rank: int
    position: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank} at position {self.position}"


def _program_of(
    ranks: list[list[Action]],
    placement: Placement | None,
    num_microbatches: int | None,
    name: str,
) -> Program:
    """Complete a program that was read from rows of actions."""
    computes = [
        Step(rank, position, part)
        for rank, actions in enumerate(ranks)
        for position, action in enumerate(actions)
        for part in action.each
        if part.kind.is_compute
    ]
    if not computes:
        raise ScheduleError("the program computes nothing: no rank has an action such as 0F0")
    if placement is None:
        stages: dict[int, Step] = {}
        for found in computes:
            first = stages.setdefault(found.action.stage, found)
            if first.rank != found.rank:
                raise ScheduleError(
                    f"a stage has one rank, but stage {found.action.stage} is computed on two: "
                    f"{first} and {found}"
                )
        _check_dense("stage", stages)
        in_order = tuple(stages[stage].rank for stage in range(len(stages)))
        placement = Placement(len(ranks), in_order)
    if num_microbatches is None:
        microbatches = {
            step.action.microbatch: step for step in computes if step.action.microbatch is not None
        }
        _check_dense("microbatch", microbatches)
        num_microbatches = len(microbatches)
    return Program.of(placement, num_microbatches, ranks, name=name)


def _check_dense(what: str, places: Mapping[int, Step]) -> None:
    missing = next((n for n, number in enumerate(sorted(places)) if n != number), None)
    if missing is not None:
        highest = max(places)
        raise ScheduleError(
            f"nothing computes {what} {missing}, but there is {what} {highest}, "
            f"{places[highest]}; expected each {what} from 0 on"
        )
