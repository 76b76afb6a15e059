"""Find out whether all ranks reach the end of their actions.

In:  a complete program (see `completeness`) with equal message order at both ends
     of each stream (see `validate`).
Out: how far each rank comes, and a fault for each reason to stop.

Transfers are rendezvous: complete when both halves are posted, and only then.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.program.action import Action, Edges, Kind, Value, reads, send_of, writes
from fxpipe.program.check.faults import Fault, FaultKind
from fxpipe.program.play.engine import Play, unit_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.play.queues import Rendezvous, Streams
from fxpipe.program.program import Program, Step

__all__ = ["check_progress"]


def check_progress(
    program: Program, numbering: Numbering, edges: Edges, streams: Streams
) -> Iterator[Fault]:
    """Every read before its write, and what each rank that gets stuck waits for."""
    play = Play(program.ranks, numbering, unit_times(program.num_stages))
    if streams == "rank":
        play.network = Rendezvous(play, streams)
    play.run()
    position = play.position
    if play.is_complete:
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
        at, explained = position[rank], False
        if at == len(actions):
            continue
        for value in reads(actions[at], edges):
            place = made[value]
            if value in arrives and arrives[value].position < at:
                send = send_of(value)
                place = Step(place.rank, program.ranks[place.rank].index(send), send)
            if place.rank != rank and place.position >= position[place.rank]:
                stop, explained = position[place.rank], True
                yield Fault(
                    FaultKind.STALL,
                    rank,
                    at,
                    actions[at],
                    f"waits for {value} from {place.action} at position {place.position} of "
                    f"rank {place.rank}, which is itself stuck at position {stop}, "
                    f"{program.ranks[place.rank][stop]}",
                )
        if streams == "rank" and not explained:
            message = "waits for a message that is behind others in the one queue of its rank"
            yield Fault(FaultKind.STALL, rank, at, actions[at], message)


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
