"""Refuse every program that would compute something else, or hang.

The one validator, for programs before and after lowering. In: a program and the
edges between its stages. Out: nothing, or a `ScheduleError` with all faults.

What a lowered program must survive is *rendezvous* communication without any
buffer. Each rank has one thread that takes its actions in order. SEND and RECV
are posted to a stream and do not block the thread; a compute action blocks until
all that it reads is there. A stream works in posting order, and a transfer
completes when its two halves are at the head of the stream at both ends. There
are three models of streams: one per pair of ranks, shared by both directions, one
per direction, and one per rank for all its peers.

If both ends of every stream list the same messages in the same order, then a
transfer is at both heads as soon as its later half is posted: each end has posted
all that comes before it, so by induction all of that is complete. The check then
needs no streams: compare the two ends of each stream, and let one run of the threads
show that they never wait for each other (`Play`). Where the two ends differ, the first
difference blocks the stream for good, whatever the threads do.

The order within a pair fixes the order within each of its directions, so what
holds for one stream per pair holds for one per direction too. With one stream per
rank a transfer also waits for messages with other peers, so the threads are run with
real queues (`Rendezvous`). `lower` with early receives passes there as well: both halves
of each transfer are added at one moment of one walk, so the messages of every rank are a
part of one order, and the first message of that order that is not complete is at the head
of both its queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, Kind, Value, reads, recv_of, send_of, writes
from fxpipe.program.check.completeness import (
    Census,
    check_offloads,
    check_parameters,
    check_size,
    check_transfers,
    check_work,
    take_census,
)
from fxpipe.program.check.faults import Fault, FaultKind, report
from fxpipe.program.play.engine import Play, unit_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.play.queues import Rendezvous, Streams
from fxpipe.program.play.walk import check_edges
from fxpipe.program.program import Program, Step

__all__ = ["Streams", "check_contents", "find_faults", "validate"]


def validate(program: Program, edges: Edges | None = None, *, streams: Streams = "pair") -> None:
    """Return if the program is sound, raise with all that is wrong otherwise.

    `streams` is the model of communication that the program must survive:
    "pair" (one communicator per pair of ranks, and therefore also one per
    direction), "direction" only, or "rank" (one for all messages of a rank, the
    hardest).

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
    if streams not in get_args(Streams):
        raise ScheduleError(f"streams is one of {get_args(Streams)}, got {streams!r}")
    edges = check_edges(program, edges)
    numbering = Numbering.of(program, edges)
    return check_contents(program, numbering, streams=streams) or tuple(
        _check_progress(program, numbering, edges, streams)
    )


def check_contents(
    program: Program, numbering: Numbering, *, streams: Streams = "pair"
) -> tuple[Fault, ...]:
    """All faults but those that show only when the program runs."""
    faults = list(check_size(program))
    if faults:
        return tuple(faults)
    census, faults = take_census(program, numbering)
    if faults:
        return tuple(faults)
    faults = [
        *check_work(program, census),
        *check_transfers(program, numbering, census),
        *check_parameters(program, census),
        *check_offloads(program, census),
    ]
    return tuple(faults) or tuple(_check_message_order(program, numbering, census, streams))


def _check_message_order(
    program: Program, numbering: Numbering, census: Census, streams: Streams
) -> Iterator[Fault]:
    for low in range(program.num_ranks):
        for high in range(low + 1, program.num_ranks):
            at_low, at_high = census.messages[low][high], census.messages[high][low]
            if at_low == at_high:
                continue
            if streams != "direction":
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


def _check_progress(
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
