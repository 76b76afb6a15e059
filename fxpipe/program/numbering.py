"""Give every value of a program a number, so that long loops touch only ints.

In:  edges, a placement and a number of microbatches.
Out: a `Numbering`: for each action kind and stage, the numbers that it reads
     and writes for microbatch 0. Microbatch m is m further on.

The numbers come out of `reads` and `writes`, which stay the one table of
dependencies. `walk`, `validate`, `lower` and `simulate` share this module.

In a lowered program a value that changes rank exists twice: as *made* on the
rank of its writer, and as *arrived* on the rank of its reader. The second has
the number of the first plus `num_values`, and readers ask for the second.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Edges, Kind, Value, ValueKind, reads, writes
from fxpipe.program.program import Placement

__all__ = ["COMPUTE_KINDS", "TRANSFER_KINDS", "Numbering"]

COMPUTE_KINDS = tuple(kind for kind in Kind if kind.is_compute)
TRANSFER_KINDS = tuple(kind for kind in Kind if kind.is_transfer)


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
                for value in (
                    *reads(Action(kind, stage, 0), edges),
                    *writes(Action(kind, stage, 0), edges),
                ):
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
                tuple(number[value] for value in writes(Action(kind, stage, 0), edges))
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
        if action.parts:
            return self.of_pair(action)[0]
        if not action.kind.is_compute or action.microbatch is None:
            return []
        return [base + action.microbatch for base in self.reads[action.kind][action.stage]]

    def writes_of(self, action: Action) -> list[int]:
        """What an action writes, parts of a pair included; nothing for other kinds."""
        if action.parts:
            return self.of_pair(action)[1]
        if not action.kind.is_compute or action.microbatch is None:
            return []
        return [base + action.microbatch for base in self.writes[action.kind][action.stage]]

    def of_pair(self, action: Action) -> tuple[list[int], list[int]]:
        """What an OVERLAP reads from outside itself, and all that it writes."""
        written = [
            base + part.microbatch
            for part in action.parts
            for base in self.writes[part.kind][part.stage]
            if part.microbatch is not None
        ]
        read = [
            base + part.microbatch
            for part in action.parts
            for base in self.reads[part.kind][part.stage]
            if part.microbatch is not None and base + part.microbatch not in written
        ]
        return read, written
