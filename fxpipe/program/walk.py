"""Visit the actions of all ranks in one order that respects every dependency.

In:  a program whose actions are well formed (see `validate`).
Out: each action once, with its rank and position, never before what it reads.

The order is that of time, as if a forward took one unit, each half of a backward
one and a whole backward two (or as long as the costs given say). Nothing in the
program depends on these durations; they decide only which of several legal
orders is taken, and `lower` sends messages in that order.

A lowered program is visited as it runs: SEND and RECV are posted and do not
block; a transfer is complete when both halves have been visited; a compute action
is visited when all it reads has been made on its rank or has arrived there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges
from fxpipe.program.numbering import Numbering
from fxpipe.program.program import Program

__all__ = ["UNIT_DURATIONS", "Step", "Visit", "check_edges", "step_table", "visit", "walk"]

# F, B, I, W as `visit` indexes them: by kind.
UNIT_DURATIONS: tuple[float, ...] = (1, 2, 1, 1)


class Step(NamedTuple):
    """One action on its visit."""

    rank: int
    position: int
    action: Action


def walk(program: Program, edges: Edges | None = None) -> Iterator[Step]:
    """Yield every action of every rank after all that it depends on.

        >>> [f"{rank}:{action}" for rank, _, action in walk(program)]
        ['0:0F0', '0:0F1', '1:1F0', '1:1B0', ...]

    Raises:
        ScheduleError: some ranks wait for each other, or for something that is
            never written. Raised before the first action is yielded; `validate`
            says more.
    """
    edges = check_edges(program, edges)
    numbering = Numbering(
        program.placement, edges, program.num_microbatches, lowered=program.is_lowered
    )
    order, position = visit(program, numbering)
    stuck = [
        f"rank {rank} at position {position[rank]} ({actions[position[rank]]})"
        for rank, actions in enumerate(program.ranks)
        if position[rank] < len(actions)
    ]
    if stuck:
        raise ScheduleError(
            f"nothing more can run: stuck are {', '.join(stuck)}; "
            "validate() tells what they wait for"
        )
    return _steps(program, order)


def _steps(program: Program, order: list[int]) -> Iterator[Step]:
    left = [enumerate(actions) for actions in program.ranks]
    for rank in order:
        position, action = next(left[rank])
        yield Step(rank, position, action)


def check_edges(program: Program, edges: Edges | None) -> Edges:
    """The edges given, or a chain; refused if they are for another number of stages."""
    if edges is None:
        return Edges.chain(program.num_stages)
    if edges.num_stages != program.num_stages:
        raise ScheduleError(
            f"the edges are for {edges.num_stages} stages, the program has {program.num_stages}"
        )
    return edges


def step_table(
    program: Program, edges: Edges | None = None
) -> tuple[tuple[Action | None, ...], ...]:
    """One row per rank, one column per step; None where a rank waits.

    In a step each rank does at most one action, and as soon as it can.

    Raises:
        ScheduleError: the program is lowered (messages have no steps in common), or stuck.
    """
    if program.is_lowered:
        raise ScheduleError("only a compute-only program has steps, this one is lowered")
    edges = check_edges(program, edges)
    numbering = Numbering(program.placement, edges, program.num_microbatches, lowered=False)
    rows: list[list[Action | None]] = [[] for _ in program.ranks]
    written_in: dict[int, int] = {}
    for rank, _, action in walk(program, edges):
        row = rows[rank]
        step = max([len(row), *(written_in[n] + 1 for n in numbering.reads_of(action))])
        row += [None] * (step - len(row))
        row.append(action)
        written_in.update((number, step) for number in numbering.writes_of(action))
    return tuple(tuple(row) for row in rows)


class Visit(NamedTuple):
    """How far a visit came.

    `order` lists ranks: its i-th entry is the rank whose next action is visited
    i-th. `position[rank]` is how many actions of the rank were visited.
    """

    order: list[int]
    position: list[int]


def visit(
    program: Program,
    numbering: Numbering,
    durations: Sequence[Sequence[float]] | None = None,
) -> Visit:
    """Run the program in time order and return the order, also when it gets stuck.

    `durations[kind][stage]` is for compute kinds; a pair takes as long as its parts
    in turn, everything else no time.
    """
    if durations is None:
        durations = [[unit] * program.num_stages for unit in UNIT_DURATIONS]
    ranks = program.ranks
    reads, writes, carried = numbering.reads, numbering.writes, numbering.carried
    num_values = numbering.num_values
    there = bytearray(2 * num_values)
    posted = bytearray(num_values)
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    position = [0] * len(ranks)
    running: list[tuple[float, int]] = []
    free = list(range(len(ranks) - 1, -1, -1))
    now: float = 0
    while True:
        while free:
            rank = free.pop()
            actions = ranks[rank]
            at = position[rank]
            while at < len(actions):
                kind, stage, microbatch, peer, parts = actions[at]
                if kind <= 3:
                    for base in reads[kind][stage]:
                        if not there[base + microbatch]:  # type: ignore[operator]
                            waiting.setdefault(base + microbatch, []).append(rank)  # type: ignore[operator]
                            break
                    else:
                        heapq.heappush(running, (now + durations[kind][stage], rank))
                    break
                if kind <= 7:
                    number = carried[kind][stage][peer] + microbatch  # type: ignore[index, operator]
                    if not kind & 1 and not there[number]:
                        break  # a send of what is not made yet: this rank is stuck for good
                    posted[number] += 1
                    if posted[number] == 2:
                        there[number + num_values] = 1
                        free.extend(waiting.pop(number + num_values, ()))
                elif parts:
                    missing = next(
                        (n for n in numbering.of_pair(actions[at])[0] if not there[n]), None
                    )
                    if missing is not None:
                        waiting.setdefault(missing, []).append(rank)
                    else:
                        took = sum(durations[part.kind][part.stage] for part in parts)
                        heapq.heappush(running, (now + took, rank))
                    break
                order.append(rank)
                at += 1
            position[rank] = at
        if not running:
            return Visit(order, position)
        now, rank = heapq.heappop(running)
        action = ranks[rank][position[rank]]
        kind, stage, microbatch, _, parts = action
        order.append(rank)
        position[rank] += 1
        free.append(rank)
        if parts:
            written = numbering.of_pair(action)[1]
        else:
            written = [base + microbatch for base in writes[kind][stage]]  # type: ignore[operator]
        for number in written:
            there[number] = 1
            if number in waiting:
                free.extend(waiting.pop(number))
