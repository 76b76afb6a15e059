"""What can be wrong with a program, as data.

A `Fault` names its kind, the rank, the position in that rank's list, the action
and says in words what is wrong. `report` joins faults into one message.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.program.action import Action

__all__ = ["Fault", "FaultKind", "report"]

_SHOWN_PER_KIND = 20


class FaultKind(enum.Enum):
    """The kinds of faults, in the order in which `validate` looks for them."""

    MALFORMED = "malformed action"
    OUT_OF_RANGE = "out of range"
    WRONG_RANK = "wrong rank"
    NO_EDGE = "transfer without an edge"
    MISSING_WORK = "missing work"
    DOUBLED_WORK = "doubled work"
    MISSING_TRANSFER = "missing transfer"
    UNMATCHED_TRANSFER = "unmatched transfer"
    DOUBLED_TRANSFER = "doubled transfer"
    PARAMETERS = "parameter handling"
    OFFLOAD = "offloading"
    MESSAGE_ORDER = "message order"
    READ_BEFORE_WRITE = "read before write"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, and where.

    `position` is None where the fault is that something is absent; `rank` is then
    the rank that should have it.
    """

    kind: FaultKind
    rank: int
    position: int | None
    action: Action
    message: str

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.position is not None:
            where += f", position {self.position}"
        return f"{where}, {self.action}: {self.message}"


def report(name: str, faults: Sequence[Fault]) -> str:
    """All faults as one text, grouped by kind."""
    program = f"program {name!r}" if name else "the program"
    count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    lines = [f"{program} is not valid, {count}:"]
    for kind in FaultKind:
        of_kind = [fault for fault in faults if fault.kind is kind]
        if not of_kind:
            continue
        lines.append(f"{kind.value}:")
        lines += [f"  {fault}" for fault in of_kind[:_SHOWN_PER_KIND]]
        if len(of_kind) > _SHOWN_PER_KIND:
            lines.append(f"  ... and {len(of_kind) - _SHOWN_PER_KIND} more of this kind")
    return "\n".join(lines)
