"""Find out whether all ranks reach the end of their actions.

In:  a complete program (see `completeness`) with equal message order at both ends
     of each stream (see `validate`).
Out: how far each rank comes, and a fault for each reason to stop.

Transfers are rendezvous: complete when both halves are posted, and only then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import length_hint
from typing import cast

from fxpipe.program.action import Action, Edges, Kind, Value, reads, send_of, writes
from fxpipe.program.check.faults import Fault, FaultKind
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Program, Step

__all__ = ["check_progress", "settle"]

# An action as the loop below sees it: in a well-formed program microbatch and peer are
# numbers wherever they are used.
_Row = tuple[int, int, int, int, tuple[Action, ...]]


def settle(program: Program, numbering: Numbering) -> list[int]:
    """Let every rank run as far as it can; return how many actions each one did.

    Which rank goes first makes no difference to that, so none is kept in step with
    another: this is the fastest way through a long program.
    """
    needed, made = numbering.reads, numbering.writes
    carried, arrived = numbering.carried, numbering.num_values
    there = bytearray(2 * numbering.num_values)
    posted = bytearray(numbering.num_values)
    # Only the rank of a value's reader ever waits for it.
    waiting: dict[int, int] = {}
    ranks = cast(Sequence[Sequence[_Row]], program.ranks)
    rest = [iter(actions) for actions in ranks]
    stopped: list[tuple[_Row, ...]] = [()] * len(ranks)
    free = list(range(len(ranks)))
    while free:
        rank = free.pop()
        for action in chain(stopped[rank], rest[rank]):
            kind, stage, microbatch, peer, parts = action
            if kind <= 3:
                bases, written = needed[kind][stage], made[kind][stage]
            elif parts:
                (bases, written), microbatch = numbering.of_pair(cast(Action, action)), 0
            elif kind <= 7:
                number = carried[kind][stage][peer] + microbatch
                if kind & 1 == 0 and not there[number]:  # a SEND of what is not made yet
                    stopped[rank] = (action,)
                    break
                if posted[number]:
                    there[number + arrived] = 1
                    if number + arrived in waiting:
                        free.append(waiting.pop(number + arrived))
                posted[number] = 1
                continue
            else:
                continue
            for base in bases:
                if not there[base + microbatch]:
                    waiting[base + microbatch] = rank
                    break
            else:
                for base in written:
                    there[base + microbatch] = 1
                    if base + microbatch in waiting:
                        free.append(waiting.pop(base + microbatch))
                continue
            stopped[rank] = (action,)
            break
        else:
            stopped[rank] = ()
    return [
        len(actions) - length_hint(left) - len(stop)
        for actions, left, stop in zip(ranks, rest, stopped, strict=True)
    ]


def check_progress(program: Program, numbering: Numbering, edges: Edges) -> Iterator[Fault]:
    """Every read before its write, and what each rank that gets stuck waits for."""
    position = settle(program, numbering)
    if all(at == len(actions) for at, actions in zip(position, program.ranks, strict=True)):
        return
    made, arrives = _where_written(program, edges)
    for rank, actions in enumerate(program.ranks):
        for at, action in enumerate(actions):
            for value in reads(action, edges):
                place = arrives.get(value, made[value]) if _computes(action) else made[value]
                if place.rank == rank and place.position > at:
                    message = f"reads {value}, written only by {place.action} at position "
                    yield Fault(
                        FaultKind.READ_BEFORE_WRITE, rank, at, action, f"{message}{place.position}"
                    )
    for rank, actions in enumerate(program.ranks):
        at = position[rank]
        if at == len(actions):
            continue
        for value in reads(actions[at], edges):
            place = made[value]
            if value in arrives and arrives[value].position < at:
                send = send_of(value)
                place = Step(place.rank, program.ranks[place.rank].index(send), send)
            if place.rank != rank and place.position >= position[place.rank]:
                stop = position[place.rank]
                yield Fault(
                    FaultKind.STALL,
                    rank,
                    at,
                    actions[at],
                    f"waits for {value} from {place.action} at position {place.position} of "
                    f"rank {place.rank}, which is itself stuck at position {stop}, "
                    f"{program.ranks[place.rank][stop]}",
                )


def _where_written(program: Program, edges: Edges) -> tuple[dict[Value, Step], dict[Value, Step]]:
    """Where each value is made and, in a lowered program, where it is received."""
    made: dict[Value, Step] = {}
    arrives: dict[Value, Step] = {}
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            into = made if _computes(action) else arrives
            for value in writes(action, edges):
                into[value] = Step(rank, position, action)
    return made, arrives


def _computes(action: Action) -> bool:
    return action.kind.is_compute or action.kind is Kind.OVERLAP
