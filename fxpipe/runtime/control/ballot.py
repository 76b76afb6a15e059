"""Votes of data-parallel replicas, and of ranks that share a stage: all learn the same outcome.

A vote is one all-reduce of a few bytes over a gloo group of our own, which ends with the step's
deadline. A replica that waits until then gives the vote up. What it has sent may still complete
the vote of one that comes later: so the store decides, where the first word about a vote stays,
"given up" or "counted". Why somebody failed is in the store, too, and read only then.

Who has voted in time need not ask. Nobody waits for a vote before the one before has ended, which
needs everybody's: so nobody can have given this vote up sooner than the timeout after this
replica cast its last one. (Replicas are expected to have the same timeout, give or take half.)
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import RemoteStageError
from fxpipe.runtime.control.board import Board
from fxpipe.runtime.control.meeting import connect_gloo, name_of, own_store
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import close_connections

__all__ = ["BALLOTS", "REPLICA", "Ballot", "SilentReplicaError", "ballot_of"]

_GRACE = 2.0  # seconds for what others have counted to arrive here

REPLICA = "a data-parallel replica of this stage"

BALLOTS: weakref.WeakKeyDictionary[dist.ProcessGroup, Ballot] = weakref.WeakKeyDictionary()


class SilentReplicaError(RemoteStageError):
    """A replica has not answered in time: nobody knows which vote it would answer later."""


def ballot_of(group: dist.ProcessGroup, deadline: Deadline, who: str = REPLICA) -> Ballot:
    """The votes of a group of replicas (or of those that are `who`), which meet at the first one.

    Raises:
        SilentReplicaError: one of them does not come before the deadline.
    """
    if group not in BALLOTS:
        prefix = f"fxpipe/votes/{name_of(group)}"
        board = Board(own_store(), prefix, group.rank(), group.size())
        try:
            BALLOTS[group] = Ballot(connect_gloo(board, deadline), board, who)
        except RuntimeError as error:  # of ours, of gloo or of the store
            raise SilentReplicaError(f"{who} did not answer: {error}") from error
    return BALLOTS[group]


class Ballot:
    """The votes of one group of replicas."""

    def __init__(self, gloo: Any, board: Board, who: str) -> None:
        self._gloo, self._board, self._who = gloo, board, who
        self._number = 0
        self._cast = -float("inf")

    def vote(self, flags: Sequence[bool], deadline: Deadline) -> list[bool]:
        """For each flag whether any replica has set it.

        Raises:
            SilentReplicaError: a replica has not voted, or has given the vote up.
        """
        before, self._cast = self._cast, time.monotonic()
        self._number += 1
        found = _bits(flags)
        work = self._gloo.allreduce([found], _maximum(deadline))
        try:
            self._wait(work, deadline)
        except SilentReplicaError:
            if self._decide("given up") != "counted":
                raise
            self._wait(work, Deadline(_GRACE))
        else:
            in_time = time.monotonic() - before < deadline.seconds / 2
            if not in_time and self._decide("counted") != "counted":
                raise SilentReplicaError(
                    f"{self._who} did not answer: it has given this step up, because this one "
                    f"came more than {deadline.seconds:g} s later"
                )
        return [bool(flag) for flag in found.tolist()]

    def open(self, digest: int, deadline: Deadline) -> Callable[[], bool]:
        """Begin to compare a number of all replicas; whether it is the same, when asked.

        Asking raises SilentReplicaError if a replica does not say its own before the deadline.
        """
        both = torch.tensor([digest, -digest], device="cpu")
        work = self._gloo.allreduce([both], _maximum(deadline))

        def is_same() -> bool:
            self._wait(work, deadline)
            return int(both.sum()) == 0

        return is_same

    def cast(self, flags: Sequence[bool], deadline: Deadline) -> Callable[[Deadline], list[bool]]:
        """Vote without waiting for the others; what is returned waits for the outcome."""
        self._cast = time.monotonic()
        self._number += 1
        found = _bits(flags)
        work = self._gloo.allreduce([found], _maximum(deadline))

        def outcome(limit: Deadline) -> list[bool]:
            self._wait(work, limit)
            return [bool(flag) for flag in found.tolist()]

        return outcome

    def say(self, message: str) -> None:
        """Say why this one will vote that it has failed. The first words of a vote stay."""
        key = self._board.key(f"words/{self._number + 1}")
        self._ask(lambda store: store.compare_set(key, "", message))

    def close(self, message: str) -> None:
        """Say why this one will not vote again, and wake who waits for it."""
        self.say(message)
        close_connections(self._gloo)

    def said(self, *, has_voted: bool = True) -> str:
        """What was said about the latest vote, or about the one that comes next."""
        key = self._board.key(f"words/{self._number + (not has_voted)}")
        found = self._ask(lambda store: store.get(key) if store.check([key]) else b"")
        return bytes(found or b"").decode(errors="replace")

    def compare(self, mine: str, deadline: Deadline) -> list[str]:
        """What each says, by rank, after a vote that all found the same in."""
        keys = [self._board.key(f"{self._number}/{rank}") for rank in range(self._board.size)]

        def all_of(store: Any) -> list[bytes]:
            store.set(keys[self._board.rank], mine)
            store.wait(keys, deadline.timeout)
            return [store.get(key) for key in keys]

        found = self._ask(all_of, deadline.left()) or []
        return [bytes(one).decode() for one in found]

    def _ask(self, work: Callable[[Any], Any], seconds: float | None = None) -> Any:
        """What the store answers; None if its holder is gone, and with it the job."""
        try:
            return self._board.store.ask(work, seconds)
        except RuntimeError:
            return None

    def _wait(self, work: Any, deadline: Deadline) -> None:
        try:
            work.wait(deadline.timeout)
        except RuntimeError as error:
            why = f": {str(error).splitlines()[0]}"
            if deadline.left() < 0.1:  # gloo words it in several ways; the clock does not
                why = f" within {deadline.seconds:g} s"
            raise SilentReplicaError(f"{self._who} did not answer{why}") from error

    def _decide(self, word: str) -> str:
        """What the replicas hold of this vote: the word of the first who asks."""
        key = self._board.key(f"vote/{self._number}")
        found = self._ask(lambda store: store.compare_set(key, "", word))
        return "given up" if found is None else bytes(found).decode()


def _maximum(deadline: Deadline) -> Any:
    options: Any = dist.AllreduceOptions()
    options.timeout = deadline.timeout
    options.reduceOp = dist.ReduceOp.MAX
    return options


def _bits(flags: Sequence[bool]) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.uint8, device="cpu")
