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
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Edges
from fxpipe.program.check.completeness import take_census
from fxpipe.program.check.faults import report
from fxpipe.program.play.engine import Play, Times, unit_times
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.play.queues import Rendezvous
from fxpipe.program.program import Program, Step

__all__ = ["check_edges", "step_table", "visit", "walk"]


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
    numbering = Numbering.of(program, edges)
    _, faults = take_census(program, numbering)
    if faults:
        raise ScheduleError(report(program.name, faults))
    play = visit(program, numbering)
    stuck = [
        f"rank {rank} at position {at} ({actions[at]})"
        for rank, (at, actions) in enumerate(zip(play.position, program.ranks, strict=True))
        if at < len(actions)
    ]
    if stuck:
        raise ScheduleError(
            f"nothing more can run: stuck are {', '.join(stuck)}; "
            "validate() tells what they wait for"
        )
    return (Step(rank, at, program.ranks[rank][at]) for _, rank, at, _, _ in play.by_end())


def visit(program: Program, numbering: Numbering, times: Times | None = None) -> Play:
    """Play well-formed actions as far as they go, by default in units."""
    play = Play(program.ranks, numbering, times or unit_times(program.num_stages, transfer=0.125))
    if numbering.lowered:
        play.network = _Noted(play)
    play.run()
    return play


class _Noted(Rendezvous):
    """Transfers without time that are noted among what was played."""

    def __init__(self, play: Play) -> None:
        super().__init__(play, "pair")

    def post(self, rank: int, position: int, number: int, now: float) -> float:
        self._play.done.append((now, rank, position, now, -1))
        return super().post(rank, position, number, now)

    def handle(self, rank: int, position: int, now: float) -> float:
        self._play.done.append((now, rank, position, now, -1))
        return now


def check_edges(program: Program, edges: Edges | None) -> Edges:
    """The edges given, or a chain; refused if they are for another number of stages."""
    if edges is None:
        return Edges.chain(program.num_stages)
    if edges.num_stages != program.num_stages:
        raise ScheduleError(
            f"the edges are for {edges.num_stages} stages, the program has {program.num_stages}"
        )
    return edges


def step_table(program: Program) -> tuple[tuple[Action | None, ...], ...]:
    """One row per rank, one column per step; None where a rank waits.

    In a step each rank does at most one action, and as soon as it can. Stages form a chain.

    Raises:
        ScheduleError: the program is lowered (messages have no steps in common), or stuck.
    """
    if program.is_lowered:
        raise ScheduleError("only a compute-only program has steps, this one is lowered")
    numbering = Numbering.of(program, Edges.chain(program.num_stages))
    rows: list[list[Action | None]] = [[] for _ in program.ranks]
    written_in: dict[int, int] = {}
    for rank, _, action in walk(program):
        row = rows[rank]
        step = max([len(row), *(written_in[n] + 1 for n in numbering.reads_of(action))])
        row += [None] * (step - len(row))
        row.append(action)
        written_in.update((number, step) for number in numbering.writes_of(action))
    return tuple(tuple(row) for row in rows)
