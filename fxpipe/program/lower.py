"""Turn a compute-only program into one that also moves tensors and parameters.

In:  a valid Program whose actions are forwards and backwards (or pairs of them).
Out: the same work with a SEND and a RECV for each value that changes rank and, if
     asked for, UNSHARD, RESHARD and REDUCE_GRAD. The input is left alone.

Both halves of a transfer are added while visiting its producer, so two ranks
always list their messages in the same order. Keep it that way: a recv that is
moved later by itself can leave both ranks waiting for each other.

Why "late" receives cannot stall. Let the visit be the clock. SEND k of a pair of
ranks stands at its time t(k), its RECV at r(k) >= t(k), before its reader and before
the next operation of the pair on the receiving rank. Claim: transfer k is complete at
r(k), in time for its reader. Transfer k-1 is complete at r(k-1) by induction, and
r(k-1) stands before operation k on the rank that received it: before t(k) if that rank
sends k, before r(k) if it receives k. So at r(k) both halves are posted and the stream
is free. For one stream per direction the same argument needs only the next *receive*
from the same rank, which is what "latest" uses; its programs may stall on one
stream per pair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, Kind, recv_of, send_of, writes
from fxpipe.program.costs import Costs
from fxpipe.program.numbering import COMPUTE_KINDS, Numbering
from fxpipe.program.program import Program
from fxpipe.program.validate import validate
from fxpipe.program.walk import check_edges, visit

__all__ = ["Receives", "fuse_backward", "lower"]

Receives = Literal["early", "late", "latest"]


def lower(
    program: Program,
    edges: Edges | None = None,
    *,
    receives: Receives = "early",
    fuse: bool = True,
    keep_input_backward: Collection[int] = (),
    reduce_grad: bool = False,
    max_unsharded: int | None = None,
    costs: Costs | None = None,
) -> Program:
    """Add all that a program needs to run on several ranks.

        rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0

    Args:
        receives: where receives stand. "early": as soon as the sender sends, so that the
            message finds its receiver ready. "late": just before the reader or the
            next message of the same pair of ranks, so that a buffer is held for
            less time. "latest": later still, for one communicator per direction only.
        fuse: let `fuse_backward` join halves of backwards first.
        keep_input_backward: stages whose model inputs need a gradient; see `fuse_backward`.
        reduce_grad: add REDUCE_GRAD after each stage's last weight gradient.
        max_unsharded: add UNSHARD and RESHARD such that no rank ever holds more than
            this number of stages unsharded. The next stages to be used are unsharded
            ahead of time, as far as the number allows.
        costs: order messages by these durations instead of F=I=W=1. On one
            communicator per pair of ranks a message waits for those before it, so
            the order should be that in which they really become ready.

    Raises:
        ScheduleError: the program is not valid, is lowered already, or a pair needs more
            stages at once than `max_unsharded`.
    """
    edges = check_edges(program, edges)
    if program.is_lowered:
        raise ScheduleError("the program is lowered already: it has more than compute actions")
    validate(program, edges)
    if fuse:
        program = fuse_backward(program, edges, keep_input_backward=keep_input_backward)
    ranks = _add_transfers(program, edges, costs)
    if receives != "early":
        ranks = _delay_receives(program, edges, ranks, receives)
    if reduce_grad:
        ranks = [_add_reductions(actions) for actions in ranks]
    if max_unsharded is not None:
        ranks = [_add_sharding(rank, actions, max_unsharded) for rank, actions in enumerate(ranks)]
    lowered = Program.of(program.placement, program.num_microbatches, ranks, name=program.name)
    validate(lowered, edges, streams="direction" if receives == "latest" else "pair")
    return lowered


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
    ranks = [
        _join_neighbours(_drop_useless(actions, useless), joinable) for actions in program.ranks
    ]
    return Program.of(program.placement, program.num_microbatches, ranks, name=program.name)


def _drop_useless(actions: Iterable[Action], stages: set[int]) -> list[Action]:
    kept: list[Action] = []
    for action in actions:
        if action.parts:
            parts = _drop_useless(action.parts, stages)
            kept += [Action.overlap(*parts)] if len(parts) == 2 else parts
        elif action.stage not in stages or action.kind <= Kind.BACKWARD:
            kept.append(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept.append(action._replace(kind=Kind.BACKWARD))
    return kept


def _join_neighbours(actions: list[Action], stages: set[int]) -> list[Action]:
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


def _add_transfers(program: Program, edges: Edges, costs: Costs | None) -> list[list[Action]]:
    numbering = Numbering(program.placement, edges, program.num_microbatches, lowered=False)
    durations = None
    if costs is not None:
        durations = [
            [costs.compute(kind, stage) for stage in range(program.num_stages)]
            for kind in COMPUTE_KINDS
        ]
    order, _ = visit(program, numbering, durations)
    lowered: list[list[Action]] = [[] for _ in program.ranks]
    moves = _moves(program, edges, lowered)
    left = [iter(actions) for actions in program.ranks]
    new = tuple.__new__
    for rank in order:
        action = next(left[rank])
        here = lowered[rank]
        here.append(action)
        for part in action[4] or (action,):
            kind, stage, microbatch, _, _ = part
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
    program: Program, edges: Edges, ranks: list[list[Action]], receives: Receives
) -> list[list[Action]]:
    numbering = Numbering(program.placement, edges, program.num_microbatches, lowered=True)
    rank_of = program.placement.stage_to_rank
    offset = numbering.num_values
    delayed: list[list[Action]] = []
    for actions in ranks:
        kept: list[Action] = []
        # At most one receive per peer rank is on hold: the next one lets it go.
        held: dict[int, tuple[int, Action]] = {}
        peer_of: dict[int, int] = {}
        for action in actions:
            if action.kind.is_transfer:
                assert action.peer is not None and action.microbatch is not None
                peer = rank_of[action.peer]
                if peer in held and (receives == "late" or action.kind.is_recv):
                    number, recv = held.pop(peer)
                    del peer_of[number]
                    kept.append(recv)
                if action.kind.is_recv:
                    number = numbering.carried[action.kind][action.stage][action.peer]
                    number += action.microbatch + offset
                    held[peer] = (number, action)
                    peer_of[number] = peer
                    continue
            elif peer_of:
                needed = [n for n in numbering.reads_of(action) if n in peer_of]
                kept += [held.pop(peer_of.pop(number))[1] for number in needed]
            kept.append(action)
        delayed.append(kept)
    return delayed


def _add_reductions(actions: list[Action]) -> list[Action]:
    """Reduce a stage once its last weight gradient is there and its sends are on their way."""
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        for part in action.parts or (action,):
            if part.kind is Kind.BACKWARD or part.kind is Kind.BACKWARD_WEIGHT:
                last[part.stage] = position
    due: dict[int, list[Action]] = {}
    for stage, position in last.items():
        while position + 1 < len(actions) and actions[position + 1].kind.is_send:
            position += 1
        due.setdefault(position, []).append(Action(Kind.REDUCE_GRAD, stage))
    return [
        new for position, action in enumerate(actions) for new in (action, *due.get(position, ()))
    ]


def _add_sharding(rank: int, actions: list[Action], max_unsharded: int) -> list[Action]:
    """Keep the next stages to be used unsharded, as many as allowed."""
    upcoming = _upcoming(rank, actions, max_unsharded)
    sharded: list[Action] = []
    unsharded: list[int] = []
    for action, wanted in zip(actions, upcoming, strict=True):
        if wanted is not None:
            sharded += [Action(Kind.RESHARD, stage) for stage in unsharded if stage not in wanted]
            sharded += [Action(Kind.UNSHARD, stage) for stage in wanted if stage not in unsharded]
            unsharded = [*wanted]
        sharded.append(action)
    return sharded + [Action(Kind.RESHARD, stage) for stage in unsharded]


def _upcoming(rank: int, actions: list[Action], max_unsharded: int) -> list[tuple[int, ...] | None]:
    """For each compute action the next stages to be used, its own first; None for others."""
    upcoming: list[tuple[int, ...] | None] = []
    queue: list[int] = []
    for action in reversed(actions):
        if not action.parts and not action.kind.is_compute:
            upcoming.append(None)
            continue
        used = list(dict.fromkeys(part.stage for part in action.parts or (action,)))
        if len(used) > max_unsharded:
            raise ScheduleError(
                f"rank {rank}, {action}: needs {len(used)} stages unsharded at once, "
                f"but max_unsharded is {max_unsharded}"
            )
        queue = used + [stage for stage in queue if stage not in used]
        upcoming.append(tuple(queue[:max_unsharded]))
    return upcoming[::-1]
