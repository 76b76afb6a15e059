"""Refuse every program that would compute something else, or hang.

The one validator, for programs before and after lowering. In: a program and the
edges between its stages. Out: nothing, or a `ScheduleError` with all faults.

What a lowered program must survive is *rendezvous* communication without any
buffer. Each rank has one thread that takes its actions in order. SEND and RECV
are posted to a stream and do not block the thread; a compute action blocks until
all that it reads is there. A stream works in posting order, and a transfer
completes when its two halves are at the head of the stream at both ends. There
are two models of streams: one per pair of ranks, shared by both directions, and
one per direction.

If both ends of every stream list the same messages in the same order, then a
transfer is at both heads as soon as its later half is posted: each end has posted
all that comes before it, so by induction all of that is complete. The check then
needs no streams: compare the two ends of each stream, and let one `visit` show
that the threads never wait for each other. Where the two ends differ, the first
difference blocks the stream for good, whatever the threads do.

The order within a pair fixes the order within each of its directions, so what
holds for one stream per pair holds for one per direction too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, Kind, Value, reads, recv_of, send_of, writes
from fxpipe.program.census import Census, take_census
from fxpipe.program.completeness import check_parameters, check_transfers, check_work
from fxpipe.program.faults import Fault, FaultKind, report
from fxpipe.program.numbering import Numbering
from fxpipe.program.program import Program
from fxpipe.program.walk import Step, check_edges, visit

__all__ = ["Streams", "find_faults", "validate"]

Streams = Literal["pair", "direction"]


def validate(program: Program, edges: Edges | None = None, *, streams: Streams = "pair") -> None:
    """Return if the program is sound, raise with all that is wrong otherwise.

    `streams` is the model of communication that the program must survive:
    "pair" (one communicator per pair of ranks, and therefore also one per
    direction), or "direction" only.

    Raises:
        ScheduleError: with every fault of the first class of faults found:
            actions that make no sense; missing, doubled or unmatched ones;
            messages in different order at two ranks; reads before writes and stalls.
    """
    faults = find_faults(program, edges, streams=streams)
    if faults:
        raise ScheduleError(report(program.name, faults))


def find_faults(
    program: Program, edges: Edges | None = None, *, streams: Streams = "pair"
) -> tuple[Fault, ...]:
    """What `validate` would report, as data; empty if the program is sound."""
    edges = check_edges(program, edges)
    numbering = Numbering(
        program.placement, edges, program.num_microbatches, lowered=program.is_lowered
    )
    census, faults = take_census(program, numbering)
    if faults:
        return tuple(faults)
    faults = [
        *check_work(program, census),
        *check_transfers(program, numbering, census),
        *check_parameters(program, census),
    ]
    if faults:
        return tuple(faults)
    faults = list(_check_message_order(program, numbering, census, streams))
    if faults:
        return tuple(faults)
    return tuple(_check_progress(program, numbering, edges))


def _check_message_order(
    program: Program, numbering: Numbering, census: Census, streams: Streams
) -> Iterator[Fault]:
    for low in range(program.num_ranks):
        for high in range(low + 1, program.num_ranks):
            at_low, at_high = census.messages[low][high], census.messages[high][low]
            if at_low == at_high:
                continue
            if streams == "pair":
                yield _first_difference(program, numbering, (low, high), at_low, at_high)
                continue
            for sender in (low, high):
                sent, received = (
                    [
                        number
                        for number in messages
                        if program.placement.stage_to_rank[numbering.value(number).stage] == sender
                    ]
                    for messages in (at_low, at_high)
                )
                if sent != received:
                    yield _first_difference(program, numbering, (low, high), sent, received)


def _first_difference(
    program: Program,
    numbering: Numbering,
    ends: tuple[int, int],
    at_low: list[int],
    at_high: list[int],
) -> Fault:
    """Where two ends of a stream, with equal messages in unequal order, part ways."""
    low, high = ends
    index = next(i for i, (a, b) in enumerate(zip(at_low, at_high, strict=True)) if a != b)
    here = _half(program, numbering.value(at_low[index]), low)
    there = _half(program, numbering.value(at_high[index]), high)
    position = program.ranks[low].index(here)
    return Fault(
        FaultKind.MESSAGE_ORDER,
        low,
        position,
        here,
        f"is message {index} between ranks {low} and {high} here, but on rank {high} that is "
        f"{there} at position {program.ranks[high].index(there)}: each end waits for the other",
    )


def _half(program: Program, value: Value, rank: int) -> Action:
    is_sender = program.placement.stage_to_rank[value.stage] == rank
    return send_of(value) if is_sender else recv_of(value)


def _check_progress(program: Program, numbering: Numbering, edges: Edges) -> Iterator[Fault]:
    _, position = visit(program, numbering)
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
