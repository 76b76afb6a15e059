"""All hold the same of a vote, also where the first who waited has given it up."""

from typing import Any

import pytest
import torch.distributed as dist

from fxpipe.runtime.control.ballot import Ballot, SilentReplicaError
from fxpipe.runtime.control.board import Board
from fxpipe.runtime.control.store import Store
from fxpipe.runtime.wire.failure import Deadline


class Late:
    """A group whose votes are all there, but only for who waits so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def allreduce(self, tensors: Any, options: Any) -> "Late":
        return Late(self.times)

    def wait(self, timeout: Any) -> None:
        self.times -= 1
        if self.times > 0:
            raise RuntimeError("Operation timed out!")


def ballot(store: Any, rank: int, times: int) -> Ballot:
    return Ballot(Late(times), Board(Store(lambda: store), "votes", rank, 2), "the other one")


def test_a_vote_that_was_given_up_counts_for_nobody() -> None:
    # Of a vote that is complete too late, the last one would be the only one that succeeds.
    store = dist.HashStore()

    with pytest.raises(SilentReplicaError, match="the other one did not answer"):
        ballot(store, 0, 2).vote([False], Deadline(5.0))
    with pytest.raises(SilentReplicaError, match="it has given this step up"):
        ballot(store, 1, 1).vote([False], Deadline(5.0))


def test_a_vote_that_others_have_counted_counts_for_who_has_waited_too_short() -> None:
    store = dist.HashStore()

    assert ballot(store, 1, 1).vote([True, False], Deadline(5.0)) == [True, False]
    assert ballot(store, 0, 2).vote([True, False], Deadline(5.0)) == [True, False]
