"""Let transfers complete in the order in which their halves were posted.

A communicator works through its operations in posting order, and a transfer completes
when its two halves are at the head of their queues at both ends. `Streams` says what
shares a queue on a rank:

    "direction"  the messages to one other rank, or those from it
    "pair"       all messages with one other rank, both ways
    "rank"       all messages of the rank, whoever they are with
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Literal, TypeVar

from fxpipe.program.action import ValueKind
from fxpipe.program.play.engine import Play
from fxpipe.program.play.numbering import Numbering

__all__ = ["Meeting", "QueueKey", "Queues", "Rendezvous", "Streams"]

Streams = Literal["pair", "direction", "rank"]
QueueKey = tuple[int, ...]
"""The rank whose queue it is, then what the messages in it share."""

Half = TypeVar("Half")
Meeting = tuple[int, Half, Half]
"""The number of a value, and what was said when it was sent and when it was received."""


class Queues(Generic[Half]):
    """The queues of all ranks; each half is kept with what the caller says about it.

    With `lanes` activations and gradients do not share a queue: each have a communicator.
    """

    def __init__(self, numbering: Numbering, streams: Streams, *, lanes: bool = False) -> None:
        self._numbering, self._streams, self._lanes = numbering, streams, lanes
        self._queues: dict[QueueKey, deque[int]] = {}
        self._halves: dict[tuple[int, int], Half] = {}

    def keys(self, number: int) -> tuple[QueueKey, QueueKey]:
        """The queues of a value's sender and of its receiver."""
        value = self._numbering.value(number)
        source, target = self._numbering.ends(value)
        lane = int(self._lanes and value.kind is ValueKind.ACTIVATION)
        if self._streams == "rank":
            return (source, lane), (target, lane)
        if self._streams == "pair":
            return (source, lane, target), (target, lane, source)
        return (source, lane, source, target), (target, lane, source, target)

    def post(self, rank: int, number: int, half: Half) -> list[Meeting[Half]]:
        """Put half a transfer into its queue; return the transfers that begin now, in order."""
        mine = next(key for key in self.keys(number) if key[0] == rank)
        self._queues.setdefault(mine, deque()).append(number)
        self._halves[rank, number] = half
        begun: list[Meeting[Half]] = []
        moved = [mine]
        while moved:
            queue = self._queues.get(moved.pop())
            if not queue:
                continue
            number = queue[0]
            keys = self.keys(number)
            ends = [self._queues.get(key) for key in keys]
            if all(end and end[0] == number for end in ends):
                for key in keys:
                    self._queues[key].popleft()
                sent, received = (self._halves.pop((key[0], number)) for key in keys)
                begun.append((number, sent, received))
                moved += keys
        return begun


class Rendezvous:
    """A network that takes no time but keeps to the order of its queues."""

    def __init__(self, play: Play, streams: Streams) -> None:
        self._play = play
        self._queues: Queues[float] = Queues(play.numbering, streams)

    def post(self, rank: int, position: int, number: int, now: float) -> float:
        for met, sent, received in self._queues.post(rank, number, now):
            self._play.deliver(met, max(sent, received))
        return now

    def handle(self, rank: int, position: int, now: float) -> float:
        return now
