"""Visit the actions of all ranks in one order that respects every dependency.

In:  a program, usually a valid one.
Out: each action once, with its rank and position, never before what it reads.

The order is that of time, as if a forward took one unit, each half of a backward
one, a whole backward two, and a transfer an eighth. Nothing in a program depends on
these times; they decide only which of several legal orders is taken. `lower`
sends messages in that order, which is why a transfer must take *some* time: with
none at all, messages that meet at one moment would be ordered by rank number, and
on a communicator shared by both directions a message would wait for one that is
ready only later (up to 27% of a step for interleaved 1F1B in simulation).

A lowered program is visited as it runs: SEND and RECV are posted and do not
block; a transfer is complete when both halves have been visited; a compute action
is visited when all it reads has been made on its rank or has arrived there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges, Value
from fxpipe.program.check.census import take_census
from fxpipe.program.check.faults import report
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Program, Step

__all__ = ["Times", "Visit", "check_edges", "step_table", "unit_times", "visit", "walk"]


def walk(program: Program, edges: Edges | None = None) -> Iterator[Step]:
    """Yield every action of every rank after all that it depends on.

        >>> [f"{rank}:{action}" for rank, _, action in walk(program)]
        ['0:0F0', '0:0F1', '1:1F0', '1:1B0', ...]

    Raises:
        ScheduleError: an action makes no sense by itself, or some ranks wait for each
            other or for something that is never written. Raised before the first action
            is yielded; `validate` says more.
    """
    edges = check_edges(program, edges)
    numbering = Numbering(
        program.placement, edges, program.num_microbatches, lowered=program.is_lowered
    )
    _, faults = take_census(program, numbering)
    if faults:
        raise ScheduleError(report(program.name, faults))
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


class Times(NamedTuple):
    """How long a visit pretends that things take.

    `compute[kind][stage]` is for compute kinds, `transfer(source_rank, target_rank, value)`
    for values that change rank, `pair(action)` for an OVERLAP.
    """

    compute: Sequence[Sequence[float]]
    transfer: Callable[[int, int, Value], float]
    pair: Callable[[Action], float]


def unit_times(num_stages: int) -> Times:
    """F = I = W = 1, B = 2, a pair as its parts in turn, a transfer 1/8."""
    compute = [[unit] * num_stages for unit in (1.0, 2.0, 1.0, 1.0)]
    return Times(
        compute,
        transfer=lambda source_rank, target_rank, value: 0.125,
        pair=lambda action: sum(compute[part.kind][part.stage] for part in action.parts),
    )


class Visit(NamedTuple):
    """How far a visit came.

    `order` lists ranks: its i-th entry is the rank whose next action is visited
    i-th. `position[rank]` is how many actions of the rank were visited.
    """

    order: list[int]
    position: list[int]


# An action as the loop below sees it: in a well-formed program microbatch and peer are
# numbers wherever they are used.
_Part = tuple[int, int, int, int, tuple[()]]
_Row = Sequence[tuple[int, int, int, int, tuple[_Part, ...]]]


def visit(program: Program, numbering: Numbering, times: Times | None = None) -> Visit:
    """Run well-formed actions in time order; return the order, also when it gets stuck."""
    times = times or unit_times(program.num_stages)
    ranks = cast(Sequence[_Row], program.ranks)
    reads, writes = numbering.reads, _writes(program, numbering, times)
    state = _State(numbering, len(ranks))
    ready, waiting, free = state.ready, state.waiting, state.free
    order, position = result = Visit([], [0] * len(ranks))
    finishing: dict[float, list[int]] = {}
    ends: list[float] = []
    now = 0.0
    while True:
        while free:
            rank = free.pop()
            actions, at = ranks[rank], position[rank]
            while at < len(actions):
                kind, stage, microbatch, _, parts = actions[at]
                if kind <= 3:
                    bases, end = reads[kind][stage], now
                elif parts:
                    bases, end, microbatch = numbering.of_pair(program.ranks[rank][at])[0], now, 0
                elif kind > 7 or state.post(program.ranks[rank][at], now):
                    order.append(rank)
                    at += 1
                    continue
                else:
                    break
                for base in bases:
                    time = ready[base + microbatch]
                    if time < 0:
                        waiting[base + microbatch] = rank
                        break
                    if time > end:
                        end = time
                else:
                    end += (
                        times.pair(program.ranks[rank][at]) if parts else times.compute[kind][stage]
                    )
                    if end not in finishing:
                        finishing[end] = []
                        heapq.heappush(ends, end)
                    finishing[end].append(rank)
                break
            position[rank] = at
        if not ends:
            return result
        now = heapq.heappop(ends)
        for rank in finishing.pop(now):
            done = ranks[rank][position[rank]]
            position[rank] += 1
            order.append(rank)
            free.append(rank)
            for kind, stage, microbatch, _, _ in done[4] or (done,):
                stay, leave = writes[kind][stage]
                for base in stay:
                    ready[base + microbatch] = now
                for base, delay in leave:
                    ready[base + microbatch] = now + delay
                    if base + microbatch in waiting:
                        free.append(waiting.pop(base + microbatch))


class _State:
    """What is there, who waits for what, and who is free to go on, during a visit.

    `ready[number]` is when a value is there for its reader, negative while it is not.
    Only the rank of a value's reader ever waits for it.
    """

    def __init__(self, numbering: Numbering, num_ranks: int) -> None:
        self.ready = [-1.0] * (numbering.num_values * (1 + numbering.lowered))
        self.waiting: dict[int, int] = {}
        self.free = [*reversed(range(num_ranks))]
        self._numbering = numbering
        self._posted: set[int] = set()

    def post(self, transfer: Action, now: float) -> bool:
        """Post half a transfer; False if it sends what is not made yet."""
        kind, stage, microbatch, peer, _ = transfer
        assert microbatch is not None and peer is not None
        number = self._numbering.carried[kind][stage][peer] + microbatch
        if kind.is_send and self.ready[number] < 0:
            return False
        if number in self._posted:
            arrived = number + self._numbering.num_values
            self.ready[arrived] = now
            if arrived in self.waiting:
                self.free.append(self.waiting.pop(arrived))
        self._posted.add(number)
        return True


def _writes(
    program: Program, numbering: Numbering, times: Times
) -> list[list[tuple[list[int], list[tuple[int, float]]]]]:
    """For each compute kind and stage: what stays on the rank, and what leaves with a delay.

    A lowered program has transfers for the latter.
    """
    rank_of = program.placement.stage_to_rank
    delays = {
        base: times.transfer(rank_of[value.stage], rank_of[value.peer], value)
        for base, value in numbering.crossing
        if not numbering.lowered
    }
    return [
        [
            (
                [base for base in bases if base not in delays],
                [(base, delays[base]) for base in bases if base in delays],
            )
            for bases in of_kind
        ]
        for of_kind in numbering.writes
    ]
