"""Turn a compute-only program into one that also moves tensors and parameters.

In:  a valid Program whose actions are forwards and backwards (or pairs of them).
Out: the same work with a SEND and a RECV for each value that changes rank and, if
     asked for, UNSHARD, RESHARD, REDUCE_GRAD, OFFLOAD and RELOAD. The input is left alone.

Both halves of a transfer are added while visiting its producer, so two ranks
always list their messages in the same order. Keep it that way: a recv that is
moved later by itself can leave both ranks waiting for each other.

What costs time is that order, not how early a receive is posted. On a communicator
that two ranks share for both directions, a message waits for all before it, so messages
stand in the order in which they become ready. Simulated with a latency of 0.1 and 0.3
of a forward, schedules without pairs then run within 1% on average as if each message had
a channel of its own. Late receives save receive buffers, but the latency shows, since a
message leaves when its sender knows that it is awaited: 21% on average.

Why "late" receives cannot stall. Let the visit be the clock. SEND k of a pair of
ranks stands at its time t(k), its RECV at r(k) >= t(k), before its reader and before
the next operation of the pair on the receiving rank. Claim: transfer k is complete at
r(k), in time for its reader. Transfer k-1 is complete at r(k-1) by induction, and
r(k-1) stands before operation k on the rank that received it: before t(k) if that rank
sends k, before r(k) if it receives k. So at r(k) both halves are posted and the stream
is free.

Before that the halves of a backward are joined where splitting it gains nothing. A split backward
sends the gradient for the stage before early and leaves the weight gradient for a time when the
rank would be idle. It costs a little itself, so it should be there only where somebody gains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

from fxpipe.errors import ScheduleError
from fxpipe.program.action import COMPUTE_KINDS, Action, Edges, Kind, recv_of, send_of, writes
from fxpipe.program.check.faults import report
from fxpipe.program.check.validate import check_contents, find_faults, validate
from fxpipe.program.costs import StageCosts
from fxpipe.program.memory_actions import add_offloads, add_reductions, add_sharding
from fxpipe.program.play.engine import collector_paused, cost_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.play.queues import Streams
from fxpipe.program.play.walk import check_edges, visit
from fxpipe.program.program import Program

__all__ = [
    "Receives",
    "fuse_backward",
    "join_halves",
    "lower",
]


def fuse_backward(
    program: Program, edges: Edges | None = None, *, keep_input_backward: Collection[int] = ()
) -> Program:
    """Join the halves of a backward where splitting it gains nothing.

    A stage to which no gradient-returning edge leads (usually the first) has nobody to
    send an early gradient to. Its I becomes nothing and its W the whole B, unless the
    stage is in `keep_input_backward` because a model input needs its gradient.

    Elsewhere I directly followed by W of the same stage and microbatch becomes B, if no
    gradient of I goes to another rank, which would have it later than before.
    """
    edges = check_edges(program, edges)
    rank_of = program.placement.stage_to_rank
    returns = [
        [edge.source for edge in edges.into(stage) if edge.has_gradient]
        for stage in range(program.num_stages)
    ]
    useless = {
        stage
        for stage in range(program.num_stages)
        if not returns[stage] and stage not in keep_input_backward
    }
    joinable = {
        stage
        for stage in range(program.num_stages)
        if all(rank_of[source] == rank_of[stage] for source in returns[stage])
    }
    ranks: list[Sequence[Action]] = []
    for rank, given in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        kept = given if useless.isdisjoint(stages) else _drop_useless(given, useless)
        ranks.append(kept if joinable.isdisjoint(stages) else join_halves(kept, joinable))
    return Program.of(program.placement, program.num_microbatches, ranks, name=program.name)


def _drop_useless(actions: Iterable[Action], stages: set[int]) -> list[Action]:
    kept: list[Action] = []
    for action in actions:
        if action.parts:
            parts = _drop_useless(action.parts, stages)
            kept += [Action.overlap(*parts)] if len(parts) == 2 else parts
        elif action.stage not in stages or action.kind in (Kind.FORWARD, Kind.BACKWARD):
            kept.append(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept.append(action._replace(kind=Kind.BACKWARD))
    return kept


def join_halves(actions: Iterable[Action], stages: set[int]) -> list[Action]:
    """One rank's actions with I and the W right behind it as one B, on these stages."""
    joined: list[Action] = []
    for action in actions:
        if (
            action.kind is Kind.BACKWARD_WEIGHT
            and joined
            and action.stage in stages
            and joined[-1] == action._replace(kind=Kind.BACKWARD_INPUT)
        ):
            joined[-1] = action._replace(kind=Kind.BACKWARD)
        else:
            joined.append(action)
    return joined


Receives = Literal["early", "late"]


def lower(
    program: Program,
    edges: Edges | None = None,
    *,
    receives: Receives = "early",
    fuse: bool = True,
    keep_input_backward: Collection[int] = (),
    reduce_grad: bool = False,
    max_unsharded: int | None = None,
    offload: int | None = None,
    unshard_lookahead: Sequence[int] | None = None,
    costs: StageCosts | None = None,
    streams: Streams | None = None,
) -> Program:
    """Add all that a program needs to run on several ranks.

        rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0

    Args:
        receives: where receives stand. "early": as soon as the sender sends, so that the
            message finds its receiver ready. "late": just before the reader or the
            next message of the same pair of ranks, so that a buffer is held for
            less time.
        fuse: let `fuse_backward` join halves of backwards first.
        keep_input_backward: stages whose model inputs need a gradient; see `fuse_backward`.
        reduce_grad: add REDUCE_GRAD after each stage's last weight gradient.
        max_unsharded: add UNSHARD and RESHARD such that no rank ever holds more than
            this number of stages unsharded. The next stages to be used are unsharded
            ahead of time, as far as the number allows.
        offload: add OFFLOAD and RELOAD for residuals that wait for more than this number of
            compute actions of their rank.
        unshard_lookahead: for each rank, of how many of its next stages gathering may begin.
            Default: all that `max_unsharded` allows.
        costs: order messages by these durations instead of F=I=W=1. On one
            communicator per pair of ranks a message waits for those before it, so
            the order should be that in which they really become ready.
        streams: which messages of a rank share a queue where the program will run (see
            `validate`). "early" suits all, "late" a queue per pair of ranks or per direction.

    Raises:
        ScheduleError: the program is not valid, is lowered already, a pair needs more
            stages at once than `max_unsharded`, or ranks would wait for each other with these
            `receives` on these `streams`.
    """
    edges = check_edges(program, edges)
    if max_unsharded is not None and max_unsharded < 1:
        raise ScheduleError(f"max_unsharded must be at least 1, got {max_unsharded}")
    if offload is not None and offload < 2:
        raise ScheduleError(f"offload must be at least 2 compute actions, got {offload}")
    if receives not in get_args(Receives):
        raise ScheduleError(f"receives is one of {get_args(Receives)}, got {receives!r}")
    if program.is_lowered:
        raise ScheduleError("the program is lowered already: it has more than compute actions")
    with collector_paused():
        fused, order = _fused_and_ordered(program, edges, fuse, keep_input_backward, costs)
        ranks = _add_transfers(fused, edges, order)
        if receives != "early":
            ranks = _delay_receives(fused, edges, ranks)
        if reduce_grad:
            ranks = [
                add_reductions(actions, program.placement.stages_of(rank))
                for rank, actions in enumerate(ranks)
            ]
        if max_unsharded is not None:
            ranks = [
                add_sharding(
                    rank,
                    actions,
                    len(program.placement.stages_of(rank)),
                    max_unsharded,
                    None if unshard_lookahead is None else unshard_lookahead[rank],
                )
                for rank, actions in enumerate(ranks)
            ]
        if offload is not None:
            ranks = [add_offloads(actions, offload) for actions in ranks]
        lowered = Program.of(program.placement, program.num_microbatches, ranks, name=program.name)
        _check_streams(lowered, edges, receives, streams)
    return lowered


def _check_streams(
    lowered: Program, edges: Edges, receives: Receives, streams: Streams | None
) -> None:
    faults = find_faults(lowered, edges, streams=streams or "pair")
    if not faults:
        return
    found = report(lowered.name, faults)
    if receives == "early":
        raise ScheduleError(found)
    raise ScheduleError(
        f"receives={receives!r} does not suit communicators with one queue per {streams}: ranks "
        f"would wait for each other; use receives='early'. {found}"
    )


def _fused_and_ordered(
    program: Program,
    edges: Edges,
    fuse: bool,
    keep_input_backward: Collection[int],
    costs: StageCosts | None,
) -> tuple[Program, list[int]]:
    """The program with halves of backwards joined, and the ranks in order of time."""
    numbering = Numbering.of(program, edges)
    faults = check_contents(program, numbering)
    if faults:
        raise ScheduleError(report(program.name, faults))
    fused = program
    if fuse:
        fused = fuse_backward(program, edges, keep_input_backward=keep_input_backward)
    times = None if costs is None else cost_times(costs, program.num_stages)
    play = visit(fused, numbering, times)
    if not play.is_complete:
        validate(program, edges)
        raise AssertionError("joining halves of backwards made the program get stuck")
    return fused, [done[1] for done in play.by_end()]


def _add_transfers(program: Program, edges: Edges, order: list[int]) -> list[list[Action]]:
    lowered: list[list[Action]] = [[] for _ in program.ranks]
    moves = _moves(program, edges, lowered)
    rest = [iter(actions) for actions in program.ranks]
    new = tuple.__new__
    for rank in order:
        action = next(rest[rank])
        here = lowered[rank]
        here.append(action)
        for kind, stage, microbatch, _, _ in action[4] or (action,):
            for send, recv, peer, there in moves[kind][stage]:
                here.append(new(Action, (send, stage, microbatch, peer, ())))
                there.append(new(Action, (recv, peer, microbatch, stage, ())))
    return lowered


_Move = tuple[Kind, Kind, int, list[Action]]


def _moves(program: Program, edges: Edges, lowered: list[list[Action]]) -> list[list[list[_Move]]]:
    """For each compute kind and stage: send kind, recv kind, peer, and the receiver's list."""
    rank_of = program.placement.stage_to_rank
    moves: list[list[list[_Move]]] = []
    for kind in COMPUTE_KINDS:
        moves.append([])
        for stage in range(program.num_stages):
            moves[-1].append(
                [
                    (
                        send_of(value).kind,
                        recv_of(value).kind,
                        value.peer,
                        lowered[rank_of[value.peer]],
                    )
                    for value in writes(Action(kind, stage, 0), edges)
                    if rank_of[value.peer] != rank_of[stage]
                ]
            )
    return moves


def _delay_receives(
    program: Program, edges: Edges, ranks: list[list[Action]]
) -> list[list[Action]]:
    numbering = Numbering(program.placement, edges, program.num_microbatches, lowered=True)
    rank_of = program.placement.stage_to_rank
    delayed: list[list[Action]] = []
    for actions in ranks:
        kept: list[Action] = []
        # At most one receive per peer rank is on hold: the next message lets it go.
        held: dict[int, tuple[int, Action]] = {}
        peer_of: dict[int, int] = {}
        for action in actions:
            kind, stage, microbatch, other, _ = action
            if other is not None and microbatch is not None:
                peer = rank_of[other]
                if peer in held:
                    number, recv = held.pop(peer)
                    del peer_of[number]
                    kept.append(recv)
                if kind.is_recv:
                    number = numbering.carried[kind][stage][other] + microbatch
                    number += numbering.num_values
                    held[peer] = (number, action)
                    peer_of[number] = peer
                    continue
            elif peer_of:
                needed = [n for n in numbering.reads_of(action) if n in peer_of]
                kept += [held.pop(peer_of.pop(number))[1] for number in needed]
            kept.append(action)
        delayed.append(kept)
    return delayed
