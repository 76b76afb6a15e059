"""Let the data-parallel replicas of a pipeline's stages go on together, or fail together.

Replicas meet in collectives, which wait for everybody. So a replica that fails still does every
collective that its program owes (see `executor.drain`), with whatever gradients it has. Once a
step, after all collectives have begun and before any result is used, the replicas vote: one
all-reduce of a few bytes per group says whether all succeeded, whether all reduce, and which
parameters any of them has used. If one has failed, all raise; the words follow only then.

Votes have groups of their own. A replica that does not vote in time is an error for good: nobody
knows which vote it would answer later. So are replicas of which only some reduce: the reductions
have begun, and would be taken for those of the next step. Whatever waits for a replica, here or in
the library that wraps a stage, is woken when the step's time is over (see `lost_groups`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import InputError, RemoteStageError
from fxpipe.runtime.control.ballot import Ballot, SilentReplicaError, ballot_of
from fxpipe.runtime.parameters.lost_groups import (
    Limit,
    check_groups,
    collective_of,
    explained,
    is_lost,
    leave,
)
from fxpipe.runtime.parameters.sync import GradSync, divide_shared
from fxpipe.runtime.wire.failure import Deadline

__all__ = ["Replicas"]

_HEADER = 3  # flags before those of parameters: failed, reduces, does not reduce
_GRACE = 2.0  # seconds for collectives that all replicas have begun


class UnequalReplicasError(InputError):
    """Replicas make different collectives in one step."""


class Replicas:
    """The replicas of the stages of this process, for one step."""

    def __init__(self, syncs: Sequence[GradSync], seconds: float, *, reduces: bool) -> None:
        self._syncs, self._reduces = syncs, reduces
        self._begun = False
        self._deadline = Deadline(seconds)
        self._has_voted = False
        groups = {id(group): group for sync in syncs for group in sync.groups if group.size() > 1}
        self._groups = list(groups.values())
        self._limit = Limit(self._groups)

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Around everything that may wait for a replica."""
        if self._reduces or any(sync.is_sharded for sync in self._syncs):
            # A little sooner than the pipeline, whose other ranks only see that this one waits.
            seconds = 0.9 * self._deadline.left()
            why = f"a data-parallel replica of this stage did not answer within {seconds:.2g} s"
            self._limit.set(seconds, why)
        try:
            yield
        finally:
            self._limit.clear()

    def begin(self, earlier: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
        """Begin the step, if it has not begun; see `GradSync.begin`.

        Raises:
            RemoteStageError: a replica was silent in an earlier step.
        """
        if self._begun:
            return
        check_groups(self._groups)
        self._begun = True
        divide_shared(self._syncs)
        for sync in self._syncs:
            sync.begin(earlier, reduces=self._reduces)

    def end(self, *, succeeded: bool) -> None:
        """After the step, also after a failed one."""
        if self._begun:
            self._begun = False
            for sync in self._syncs:
                sync.end(succeeded=succeeded)

    def finish(self) -> None:
        """Vote, then wait for the results of all collectives.

        Raises:
            RemoteStageError: a replica has failed, or does not answer.
            InputError: only some replicas reduce gradients in this step.
        """
        used = [sync.used() for sync in self._syncs]
        self._has_voted = True
        for group in self._groups:
            try:
                used = self._vote(group, ballot_of(group, self._deadline), used)
            except (SilentReplicaError, UnequalReplicasError) as error:
                leave(group, str(error))
                raise
        self._limit.set(max(self._deadline.left(), _GRACE), "the results of replicas did not come")
        for sync, flags in zip(self._syncs, used, strict=True):
            sync.finish(flags, self._wait)

    def _vote(
        self, group: dist.ProcessGroup, ballot: Ballot, used: list[list[bool]]
    ) -> list[list[bool]]:
        takes_part = [any(g is group for g in sync.groups) for sync in self._syncs]
        reduces = [s.reduces for s, is_in in zip(self._syncs, takes_part, strict=True) if is_in]
        mine = [flags for flags, is_in in zip(used, takes_part, strict=True) if is_in]
        header = [False, any(reduces), not all(reduces)]
        found = ballot.vote([*header, *(flag for flags in mine for flag in flags)], self._deadline)
        failed, some_reduce, some_do_not, *flags = found
        if failed:
            raise RemoteStageError(
                f"a data-parallel replica of this stage failed: {ballot.hear(self._deadline)}"
            )
        if some_reduce and some_do_not:
            raise UnequalReplicasError(
                "some data-parallel replicas reduce the gradients of this step and some do not: "
                "finalize_gradients and no_sync() must be the same on all of them"
            )
        rest = iter(flags)
        return [
            [next(rest) for _ in known] if is_in else known
            for known, is_in in zip(used, takes_part, strict=True)
        ]

    def _wait(self, work: dist.Work | None, group: dist.ProcessGroup) -> None:
        """Wait for a collective of the replicas."""
        assert work is not None
        with collective_of([group]):
            work.wait()

    def explained(self, error: BaseException) -> BaseException:
        """What an error in a stage means, where a sharded stage waits for its replicas itself."""
        return explained(error, [g for s in self._syncs if s.is_sharded for g in s.groups])

    def give_up(self, message: str) -> None:
        """This replica has failed: vote so, unless it has voted, and do not wait."""
        if self._has_voted:
            return
        self._has_voted = True
        for group in self._groups:
            if is_lost(group):
                continue
            flags = [s.used() for s in self._syncs if any(g is group for g in s.groups)]
            failed = [True] + [False] * (_HEADER - 1 + sum(map(len, flags)))
            try:
                ballot = ballot_of(group, self._deadline)
                ballot.cast(failed, message or "unknown", self._deadline)
            except SilentReplicaError as error:
                leave(group, str(error))
