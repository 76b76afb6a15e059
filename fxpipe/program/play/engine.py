"""Run actions when they are ready: the one loop of fxpipe that plays programs in time.

In:  each rank's actions, the numbers of what they read and write, and how long all takes.
Out: when each action starts and ends, and how far each rank comes.

A rank takes its actions in order. A compute action starts when its rank is free and all
that it reads is there. What it writes is there at its end or, if it goes to another rank of
a compute-only program, a delay later. SEND and RECV are posted and do not hold up their
rank; the value arrives when both halves are posted.

`Play` lets each rank run ahead as far as the times of its inputs are known. The times do
not depend on which rank goes first, so it needs no queue of events: this is also the
quickest way to find out whether all ranks reach their end. `Dispatch` takes the ranks in
order of time instead, for those who decide only then what a rank does next.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple, Protocol, cast

from fxpipe.program.action import COMPUTE_KINDS, Action, Kind, Value
from fxpipe.program.costs import StageCosts
from fxpipe.program.play.numbering import Numbering

__all__ = [
    "Dispatch",
    "Done",
    "Network",
    "Play",
    "Times",
    "collector_paused",
    "cost_times",
    "unit_times",
]


class Times(NamedTuple):
    """How long things take.

    `compute[kind][stage]` is for compute kinds, `transfer(source_rank, target_rank, value)`
    for values that change rank, `pair(action)` for an OVERLAP.
    """

    compute: Sequence[Sequence[float]]
    transfer: Callable[[int, int, Value], float]
    pair: Callable[[Action], float]


def unit_times(num_stages: int, *, transfer: float = 0.0) -> Times:
    """F = I = W = 1, B = 2, a pair as its parts in turn."""
    compute = [[unit] * num_stages for unit in (1.0, 2.0, 1.0, 1.0)]
    return Times(
        compute,
        transfer=lambda source_rank, target_rank, value: transfer,
        pair=lambda action: sum(compute[part.kind][part.stage] for part in action.parts),
    )


def cost_times(costs: StageCosts, num_stages: int) -> Times:
    """The times that costs give."""
    return Times(
        [[costs.compute(kind, stage) for stage in range(num_stages)] for kind in COMPUTE_KINDS],
        transfer=lambda source, target, value: costs.transfer(
            source, target, costs.value_bytes(value.kind, value.stage, value.peer)
        ),
        pair=lambda action: costs.pair([(part.kind, part.stage) for part in action.parts]),
    )


class Network(Protocol):
    """What transfers and the handling of parameters do to time."""

    def post(self, rank: int, position: int, number: int, now: float) -> float:
        """Half a transfer is posted; returns when its rank goes on. See `Play.deliver`."""
        ...

    def handle(self, rank: int, position: int, now: float) -> float:
        """An UNSHARD, RESHARD or REDUCE_GRAD comes; returns when its rank goes on."""
        ...


Done = tuple[float, int, int, float, int]
"""What was played: end, rank, position, start, and the value it waited for last (-1: its rank)."""

# A well-formed action as the loop sees it: microbatch and peer are numbers.
_Row = tuple[Kind, int, int, int, tuple[Action, ...]]
# What a compute action reads, how long it takes, what it writes and how much later that is there.
_Task = tuple[Sequence[int], float, Sequence[tuple[int, float]]]
_NOT_YET = -1.0


class Play:
    """Ranks on their way through their actions.

    `ready[number]` is when a value is there for its reader, negative while that is not
    known. `done` lists what was played, each action after all that it depends on.
    `position[rank]` counts the actions of a rank that are done; `free_at[rank]` is when it
    is free for the next one. Without a `network`, transfers take no time.
    """

    network: Network | None = None

    def __init__(
        self, ranks: Sequence[Sequence[Action]], numbering: Numbering, times: Times
    ) -> None:
        self.ranks, self.numbering, self.times = ranks, numbering, times
        self.ready = [_NOT_YET] * numbering.size
        self.done: list[Done] = []
        self.position = [0] * len(ranks)
        self.free_at = [0.0] * len(ranks)
        self._delays = {
            base: times.transfer(*numbering.ends(value), value)
            for base, value in numbering.crossing
            if not numbering.lowered
        }
        self._work = self._table()
        self._posted = [_NOT_YET] * (numbering.num_values if numbering.lowered else 0)
        # Only the rank of a value's reader ever waits for it.
        self._waiting: dict[int, int] = {}
        self._turns = [*range(len(ranks))][::-1]

    @property
    def is_complete(self) -> bool:
        """Whether every rank has done all its actions."""
        return all(at == len(acts) for at, acts in zip(self.position, self.ranks, strict=True))

    def by_end(self) -> list[Done]:
        """What was played in order of time; of equal ends, first what others depend on."""
        return sorted(self.done, key=itemgetter(0))

    def run(self) -> None:
        """Play until every rank is at its end or stuck: one turn of a rank after the other."""
        ready, waiting, work = self.ready, self._waiting, self._work
        wake, played = self._wake, self.done.append
        carried, posted, num_values = (
            self.numbering.carried,
            self._posted,
            self.numbering.num_values,
        )
        is_send, network = [kind.is_send for kind in Kind], self.network
        for rank in self._take_turns():
            actions = cast(Sequence[_Row], self.ranks[rank])
            now = self.free_at[rank]
            for at in range(self.position[rank], len(actions)):
                kind, stage, microbatch, peer, parts = actions[at]
                task = work[kind][stage]
                if task is not None:
                    needed, took, made = task
                elif parts:
                    needed, took, made = self._pair(self.ranks[rank][at])
                    microbatch = 0
                elif peer is not None:
                    number = carried[kind][stage][peer] + microbatch
                    if is_send[kind] and ready[number] < 0:
                        break  # what only this rank could make, and has not made
                    if network is not None:
                        now = network.post(rank, at, number, now)
                    elif posted[number] < 0:
                        posted[number] = now
                    else:
                        ready[number + num_values] = max(now, posted[number])
                        if number + num_values in waiting:
                            wake(waiting.pop(number + num_values))
                    continue
                else:
                    now = now if network is None else network.handle(rank, at, now)
                    continue
                start, late = now, -1
                for base in needed:
                    time = ready[base + microbatch]
                    if time < 0:
                        waiting[base + microbatch] = rank
                        break
                    if time > start:
                        start, late = time, base + microbatch
                else:
                    now = start + took
                    played((now, rank, at, start, late))
                    for base, delay in made:
                        ready[base + microbatch] = now + delay
                        if base + microbatch in waiting:
                            wake(waiting.pop(base + microbatch))
                    continue
                break
            else:
                at = len(actions)
            self.position[rank], self.free_at[rank] = at, now

    def deliver(self, number: int, time: float) -> None:
        """A value that was sent is there for its reader from a time on."""
        arrived = number + self.numbering.num_values
        self.ready[arrived] = time
        if arrived in self._waiting:
            self._wake(self._waiting.pop(arrived))

    def _take_turns(self) -> Iterator[int]:
        """The ranks that run ahead, one after the other."""
        while self._turns:
            yield self._turns.pop()

    def _wake(self, rank: int) -> None:
        """It is known from when on the value is there for which a rank waits."""
        self._turns.append(rank)

    def _table(self) -> list[list[_Task | None]]:
        """For each kind and stage what a compute action does, None for other actions."""
        numbering, delays = self.numbering, self._delays
        no_tasks: list[_Task | None] = [None] * len(numbering.reads[0])
        return [
            [
                (needed, took, tuple((base, delays.get(base, 0.0)) for base in made))
                for needed, took, made in zip(
                    numbering.reads[kind],
                    self.times.compute[kind],
                    numbering.writes[kind],
                    strict=True,
                )
            ]
            if kind.is_compute
            else no_tasks
            for kind in Kind
        ]

    def _pair(self, action: Action) -> _Task:
        read, written = self.numbering.of_pair(action)
        count, delays = self.numbering.num_microbatches, self._delays
        made = [(number, delays.get(number - number % count, 0.0)) for number in written]
        return read, self.times.pair(action), made


class Dispatch(Play, ABC):
    """Ranks that decide in the course of time what to do next: give it a `choose`.

    `ranks` are lists, empty at first, to which the chosen actions go. A rank is asked when
    it is free, in order of time over all ranks, and again when a value that it waits for
    (`wait`) will be there, or at a time that it named (`ask_again`).
    """

    ranks: list[list[Action]]

    def __init__(self, num_ranks: int, numbering: Numbering, times: Times) -> None:
        super().__init__([[] for _ in range(num_ranks)], numbering, times)
        self._asked: list[tuple[float, int]] = [(0.0, rank) for rank in range(num_ranks)]

    @abstractmethod
    def choose(self, rank: int, now: float) -> Action | None:
        """What a rank does next, if that is known at this time."""

    def wait(self, rank: int, number: int) -> None:
        """Ask the rank again once it is known when a value will be there."""
        self._waiting[number] = rank

    def ask_again(self, rank: int, time: float) -> None:
        """Ask the rank again at a time."""
        heappush(self._asked, (time, rank))

    def _wake(self, rank: int) -> None:
        heappush(self._asked, (self.free_at[rank], rank))

    def _take_turns(self) -> Iterator[int]:
        asked, free_at, position, ranks = self._asked, self.free_at, self.position, self.ranks
        while asked:
            now, rank = heappop(asked)
            if now < free_at[rank]:
                continue  # it has found something to do since
            if position[rank] == len(ranks[rank]):
                action = self.choose(rank, now)
                if action is None:
                    continue
                ranks[rank].append(action)
            yield rank
            if position[rank] == len(ranks[rank]):
                heappush(asked, (free_at[rank], rank))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic collector while a long program is built.

    A program is a great number of small tuples without a cycle. While it grows, the collector
    would walk all of them again and again: with it, doubling the microbatches of a long
    program took up to 2.5 times as long to lower, without it 2.1 times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
