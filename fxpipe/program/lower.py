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

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, Kind, recv_of, send_of, writes
from fxpipe.program.costs import Costs
from fxpipe.program.faults import report
from fxpipe.program.numbering import COMPUTE_KINDS, SEND_KINDS, Numbering
from fxpipe.program.program import Program
from fxpipe.program.validate import check_contents, validate
from fxpipe.program.walk import Times, check_edges, visit

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
    if max_unsharded is not None and max_unsharded < 1:
        raise ScheduleError(f"max_unsharded must be at least 1, got {max_unsharded}")
    if receives not in get_args(Receives):
        raise ScheduleError(f"receives is one of {get_args(Receives)}, got {receives!r}")
    if program.is_lowered:
        raise ScheduleError("the program is lowered already: it has more than compute actions")
    with _collector_paused():
        fused, order = _fused_and_ordered(program, edges, fuse, keep_input_backward, costs)
        ranks = _add_transfers(fused, edges, order)
        if receives != "early":
            ranks = _delay_receives(fused, edges, ranks, receives)
        if reduce_grad:
            ranks = [
                _add_reductions(actions, program.placement.stages_of(rank))
                for rank, actions in enumerate(ranks)
            ]
        if max_unsharded is not None:
            ranks = [
                _add_sharding(rank, actions, len(program.placement.stages_of(rank)), max_unsharded)
                for rank, actions in enumerate(ranks)
            ]
        lowered = Program.of(program.placement, program.num_microbatches, ranks, name=program.name)
        validate(lowered, edges, streams="direction" if receives == "latest" else "pair")
    return lowered


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's collector from walking a growing program again and again.

    Actions hold no cycles. With it, doubling the microbatches of a long program took up to
    2.5 times as long, without it 2.1 times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _fused_and_ordered(
    program: Program,
    edges: Edges,
    fuse: bool,
    keep_input_backward: Collection[int],
    costs: Costs | None,
) -> tuple[Program, list[int]]:
    """The program with halves of backwards joined, and the ranks in order of time."""
    numbering = Numbering(program.placement, edges, program.num_microbatches, lowered=False)
    faults = check_contents(program, numbering)
    if faults:
        raise ScheduleError(report(program.name, faults))
    fused = program
    if fuse:
        fused = fuse_backward(program, edges, keep_input_backward=keep_input_backward)
    order, position = visit(fused, numbering, None if costs is None else _times(program, costs))
    if any(at < len(actions) for at, actions in zip(position, fused.ranks, strict=True)):
        validate(program, edges)
        raise AssertionError("joining halves of backwards made the program get stuck")
    return fused, order


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
        ranks.append(kept if joinable.isdisjoint(stages) else _join_neighbours(kept, joinable))
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


def _join_neighbours(actions: Iterable[Action], stages: set[int]) -> list[Action]:
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


def _times(program: Program, costs: Costs) -> Times:
    return Times(
        [
            [costs.compute(kind, stage) for stage in range(program.num_stages)]
            for kind in COMPUTE_KINDS
        ],
        transfer=lambda source, target, value: costs.transfer(
            source, target, costs.value_bytes(value.kind, value.stage, value.peer)
        ),
        pair=lambda action: costs.pair([(part.kind, part.stage) for part in action.parts]),
    )


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
    sends_release = receives == "late"
    delayed: list[list[Action]] = []
    for actions in ranks:
        kept: list[Action] = []
        # At most one receive per peer rank is on hold: the next one lets it go.
        held: dict[int, tuple[int, Action]] = {}
        peer_of: dict[int, int] = {}
        for action in actions:
            kind, stage, microbatch, other, _ = action
            if other is not None and microbatch is not None:
                peer = rank_of[other]
                is_recv = kind.is_recv
                if peer in held and (is_recv or sends_release):
                    number, recv = held.pop(peer)
                    del peer_of[number]
                    kept.append(recv)
                if is_recv:
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


def _add_reductions(actions: list[Action], stages: Collection[int]) -> list[Action]:
    """Reduce a stage once its last weight gradient is there and its sends are on their way."""
    due: dict[int, list[Action]] = {}
    reduced: set[int] = set()
    behind_sends = len(actions)
    for position in range(len(actions) - 1, -1, -1):
        action = actions[position]
        if not action.kind.is_send:
            for part in action.parts or (action,):
                adds = part.kind is Kind.BACKWARD or part.kind is Kind.BACKWARD_WEIGHT
                if adds and part.stage not in reduced:
                    reduced.add(part.stage)
                    due.setdefault(behind_sends, []).append(Action(Kind.REDUCE_GRAD, part.stage))
            if len(reduced) == len(stages):
                break
            behind_sends = position
    result: list[Action] = []
    done = 0
    for position in sorted(due):
        result += actions[done:position] + due[position]
        done = position
    return result + actions[done:]


def _add_sharding(
    rank: int, actions: list[Action], num_stages: int, max_unsharded: int
) -> list[Action]:
    """Keep the next stages to be used unsharded, as many as allowed.

    A change stands right behind the compute action that makes room for it and its sends,
    before any receive, so that gathering starts as early as it can.
    """
    sharded: list[Action] = []
    unsharded: tuple[int, ...] = ()
    done = 0
    for position, wanted in reversed(_upcoming_stages(rank, actions, num_stages, max_unsharded)):
        sharded += actions[done:position]
        sharded += [Action(Kind.RESHARD, stage) for stage in unsharded if stage not in wanted]
        sharded += [Action(Kind.UNSHARD, stage) for stage in wanted if stage not in unsharded]
        unsharded, done = wanted, position
    return sharded + actions[done:] + [Action(Kind.RESHARD, stage) for stage in unsharded]


def _upcoming_stages(
    rank: int, actions: list[Action], num_stages: int, max_unsharded: int
) -> list[tuple[int, tuple[int, ...]]]:
    """From which position on which stages are the next to be used; last position first."""
    changes: list[tuple[int, tuple[int, ...]]] = []
    passed = (*SEND_KINDS, Kind.REDUCE_GRAD)
    queue: tuple[int, ...] = ()
    head = -1
    behind_sends = position = len(actions)
    for action in reversed(actions):
        position -= 1
        kind, stage, _, _, parts = action
        if kind > 3 and not parts:
            if kind not in passed:
                behind_sends = position
            continue
        if stage != head or parts:
            used = list(dict.fromkeys(part.stage for part in parts)) if parts else [stage]
            if len(used) > max_unsharded:
                raise ScheduleError(
                    f"rank {rank}, {action}: needs {len(used)} stages unsharded at once, "
                    f"but max_unsharded is {max_unsharded}"
                )
            longer = (*used, *[other for other in queue if other not in used])
            wanted = queue[:max_unsharded]
            if wanted and not set(wanted).issuperset(longer[:max_unsharded]):
                changes.append((behind_sends, wanted))
            queue, head = longer, stage
            if len(queue) == num_stages <= max_unsharded:
                break  # all stages of the rank from the start to here
        behind_sends = position
    return [*changes, (0, _first_used(actions, queue[:max_unsharded]))]


def _first_used(actions: list[Action], stages: tuple[int, ...]) -> tuple[int, ...]:
    """The stages in the order in which they are first used."""
    found: dict[int, None] = {}
    for action in actions:
        if action.kind <= 3 or action.parts:
            found.update((p.stage, None) for p in action.parts or (action,) if p.stage in stages)
            if len(found) == len(stages):
                break
    return tuple(found)
