"""Give every value of a program a number, so that long loops touch only ints.

In:  edges, a placement and a number of microbatches.
Out: a `Numbering`: for each action kind and stage, the numbers that it reads
     and writes for microbatch 0. Microbatch m is m further on.

The numbers come out of `reads` and `writes`, which stay the one table of
dependencies. What no action reads (weight gradients) has no number: nobody waits
for it.

In a lowered program a value that changes rank exists twice: as *made* on the
rank of its writer, and as *arrived* on the rank of its reader. The second has
the number of the first plus `num_values`, and readers ask for the second.
"""

from __future__ import annotations

from typing import cast

from fxpipe.program.action import (
    COMPUTE_KINDS,
    TRANSFER_KINDS,
    Action,
    Edges,
    Kind,
    Value,
    ValueKind,
    reads,
    writes,
)
from fxpipe.program.program import Placement, Program

__all__ = ["Numbering"]

# A part of a pair in a well-formed program: it has a microbatch.
_Part = tuple[Kind, int, int, int | None, tuple[Action, ...]]


class Numbering:
    """The numbers of all values of one program.

    `reads[kind][stage]` and `writes[kind][stage]` hold numbers for microbatch 0.
    `carried[kind][stage][peer]` is the value that a transfer moves; a peer to
    which no edge leads is missing there. `crossing` lists the values that
    change rank, as `(number, value for microbatch 0)`.
    """

    def __init__(
        self, placement: Placement, edges: Edges, num_microbatches: int, *, lowered: bool = False
    ) -> None:
        self.num_microbatches = num_microbatches
        self.lowered = lowered
        self._rank_of = placement.stage_to_rank
        stages = range(edges.num_stages)
        read = [[reads(Action(kind, s, 0), edges) for s in stages] for kind in COMPUTE_KINDS]
        written = [[writes(Action(kind, s, 0), edges) for s in stages] for kind in COMPUTE_KINDS]
        self._values = list(dict.fromkeys(v for row in read for values in row for v in values))
        self.num_values = len(self._values) * num_microbatches
        made = {value: n * num_microbatches for n, value in enumerate(self._values)}
        self.crossing = tuple(
            (base, value) for value, base in made.items() if len(set(self.ends(value))) > 1
        )
        arrived = dict(made)
        if lowered:
            arrived |= {value: base + self.num_values for base, value in self.crossing}
        self.reads = [[tuple(arrived[v] for v in values) for values in row] for row in read]
        self.writes = [
            [tuple(made[v] for v in values if v in made) for values in row] for row in written
        ]
        self.carried: list[list[dict[int, int]]] = [[{} for _ in stages] for _ in Kind]
        for base, value in self.crossing:
            for kind in TRANSFER_KINDS:
                here, there = value.stage, value.peer
                if kind.is_recv:
                    here, there = there, here
                moved = Action(kind, here, 0, there)
                if value in (*reads(moved, edges), *writes(moved, edges)):
                    self.carried[kind][here][there] = base

    @staticmethod
    def of(program: Program, edges: Edges) -> Numbering:
        """The numbering of a program, lowered or not."""
        return Numbering(
            program.placement, edges, program.num_microbatches, lowered=program.is_lowered
        )

    @property
    def size(self) -> int:
        """How many numbers there are, those of arrived values included."""
        return self.num_values * (1 + self.lowered)

    def ends(self, value: Value) -> tuple[int, int]:
        """The rank that makes a value and the rank that reads it."""
        return self._rank_of[value.stage], self._rank_of[value.peer]

    def value(self, number: int) -> Value:
        """The value with this number, whether as made or as arrived."""
        base, microbatch = divmod(number % self.num_values, self.num_microbatches)
        return self._values[base]._replace(microbatch=microbatch)

    def is_activation(self, number: int) -> bool:
        return self.value(number).kind is ValueKind.ACTIVATION

    def reads_of(self, action: Action) -> tuple[int, ...]:
        """What an action reads, parts of a pair included; nothing for other kinds."""
        return self._numbers(action, 0)

    def writes_of(self, action: Action) -> tuple[int, ...]:
        """What an action writes, parts of a pair included; nothing for other kinds."""
        return self._numbers(action, 1)

    def _numbers(self, action: Action, side: int) -> tuple[int, ...]:
        kind, stage, microbatch, _, parts = action
        if parts:
            return self.of_pair(action)[side]
        if not kind.is_compute or microbatch is None:
            return ()
        table = self.writes if side else self.reads
        return tuple(base + microbatch for base in table[kind][stage])

    def of_pair(self, action: Action) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What an OVERLAP reads from outside itself, and all that it writes."""
        parts = cast(tuple[_Part, ...], action.parts)
        written = tuple(b + m for kind, stage, m, _, _ in parts for b in self.writes[kind][stage])
        read = tuple(b + m for kind, stage, m, _, _ in parts for b in self.reads[kind][stage])
        return tuple(n for n in read if n not in written), written
