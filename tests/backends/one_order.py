"""Whether all ranks' messages are parts of one order, so that one queue per rank is enough."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

__all__ = ["Posted", "left_in_queues"]

Posted = tuple[Any, bool, int]
"""A communicator, whether it is a send, and the peer."""


def left_in_queues(posted: Sequence[Sequence[Posted]]) -> list[tuple[Any, ...]]:
    """The heads of the queues of ranks that wait for each other for ever, if any do.

    A message is done when it is at the head of its sender's and of its receiver's queue.
    """
    queues: list[deque[tuple[Any, ...]]] = []
    for rank, messages in enumerate(posted):
        count: Counter[tuple[Any, ...]] = Counter()
        queues.append(deque())
        for lane, is_send, peer in messages:
            message = (lane, rank, peer) if is_send else (lane, peer, rank)
            queues[-1].append((*message, count[message]))
            count[message] += 1
    while True:
        heads = [queue[0] for queue in queues if queue]
        met = {head for head in heads if heads.count(head) == 2}
        if not met:
            return heads
        for queue in queues:
            if queue and queue[0] in met:
                queue.popleft()
