"""Give every value of a program a number, so that long loops touch only ints.

In:  edges, a placement and a number of microbatches.
Out: a `Numbering`: for each action kind and stage, the numbers that it reads
     and writes for microbatch 0. Microbatch m is m further on.

The numbers come out of `reads` and `writes`, which stay the one table of
dependencies. `walk`, `validate`, `lower` and `simulate` share this module. What no
action reads (weight gradients) has no number: nobody waits for it.

In a lowered program a value that changes rank exists twice: as *made* on the
rank of its writer, and as *arrived* on the rank of its reader. The second has
the number of the first plus `num_values`, and readers ask for the second.
"""

from __future__ import annotations

from typing import cast

from fxpipe.program.action import Action, Edges, Kind, Value, ValueKind, reads, writes
from fxpipe.program.program import Placement

__all__ = ["COMPUTE_KINDS", "SEND_KINDS", "TRANSFER_KINDS", "Numbering"]

COMPUTE_KINDS = tuple(kind for kind in Kind if kind.is_compute)
TRANSFER_KINDS = tuple(kind for kind in Kind if kind.is_transfer)
SEND_KINDS = tuple(kind for kind in Kind if kind.is_send)

# A part of a pair in a well-formed program: it has a microbatch.
_Part = tuple[int, int, int, int | None, tuple[Action, ...]]


class Numbering:
    """The numbers of all values of one program.

    `reads[kind][stage]` and `writes[kind][stage]` hold numbers for microbatch 0.
    `carried[kind][stage][peer]` is the value that a transfer moves; a peer to
    which no edge leads is missing there. `crossing` lists the values that
    change rank, as `(number, value for microbatch 0)`.
    """

    def __init__(
        self, placement: Placement, edges: Edges, num_microbatches: int, *, lowered: bool
    ) -> None:
        self.num_microbatches = num_microbatches
        self.lowered = lowered
        self._values: list[Value] = []
        number: dict[Value, int] = {}
        for kind in COMPUTE_KINDS:
            for stage in range(edges.num_stages):
                for value in reads(Action(kind, stage, 0), edges):
                    if value not in number:
                        number[value] = len(number) * num_microbatches
                        self._values.append(value)
        self.num_values = len(number) * num_microbatches
        rank_of = placement.stage_to_rank
        self.crossing = tuple(
            (base, value)
            for value, base in number.items()
            if rank_of[value.stage] != rank_of[value.peer]
        )
        arrives = {value for _, value in self.crossing} if lowered else set()
        self.reads = [
            [
                tuple(
                    number[value] + (self.num_values if value in arrives else 0)
                    for value in reads(Action(kind, stage, 0), edges)
                )
                for stage in range(edges.num_stages)
            ]
            for kind in COMPUTE_KINDS
        ]
        self.writes = [
            [
                tuple(
                    number[value]
                    for value in writes(Action(kind, stage, 0), edges)
                    if value in number
                )
                for stage in range(edges.num_stages)
            ]
            for kind in COMPUTE_KINDS
        ]
        self.carried: list[list[dict[int, int]]] = [
            [{} for _ in range(edges.num_stages)] for _ in Kind
        ]
        for base, value in self.crossing:
            for kind in TRANSFER_KINDS:
                here, there = (
                    (value.stage, value.peer) if kind.is_send else (value.peer, value.stage)
                )
                moved = Action(kind, here, 0, there)
                if value in (*reads(moved, edges), *writes(moved, edges)):
                    self.carried[kind][here][there] = base

    def value(self, number: int) -> Value:
        """The value with this number, whether as made or as arrived."""
        base, microbatch = divmod(number % self.num_values, self.num_microbatches)
        return self._values[base]._replace(microbatch=microbatch)

    def is_activation(self, number: int) -> bool:
        return self.value(number).kind is ValueKind.ACTIVATION

    def reads_of(self, action: Action) -> list[int]:
        """What an action reads, parts of a pair included; nothing for other kinds."""
        kind, stage, microbatch, _, parts = action
        if parts:
            return list(self.of_pair(action)[0])
        if kind > 3 or microbatch is None:
            return []
        return [base + microbatch for base in self.reads[kind][stage]]

    def writes_of(self, action: Action) -> list[int]:
        """What an action writes, parts of a pair included; nothing for other kinds."""
        kind, stage, microbatch, _, parts = action
        if parts:
            return list(self.of_pair(action)[1])
        if kind > 3 or microbatch is None:
            return []
        return [base + microbatch for base in self.writes[kind][stage]]

    def of_pair(self, action: Action) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What an OVERLAP reads from outside itself, and all that it writes."""
        first, second = cast(tuple[_Part, _Part], action.parts)
        written = tuple(
            base + microbatch
            for kind, stage, microbatch, _, _ in (first, second)
            for base in self.writes[kind][stage]
        )
        read = tuple(
            base + microbatch
            for kind, stage, microbatch, _, _ in (first, second)
            for base in self.reads[kind][stage]
            if base + microbatch not in written
        )
        return read, written
