"""Let the data-parallel replicas of a pipeline's stages go on together, or fail together.

Replicas meet in collectives, which wait for everybody. So a replica that fails still does every
collective that its program owes (see `executor.drain`), with whatever gradients it has. Once a
step, after all collectives have begun and before any result is used, the replicas vote: one
all-reduce of a few bytes per group says whether all succeeded, whether all reduce, and which
parameters any of them has used. If one has failed, all raise; the words follow only then.

Votes have groups of their own. A replica that does not vote in time is an error for good: nobody
knows which vote it would answer later. So are replicas of which only some reduce: the reductions
have begun, and would be taken for those of the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import InputError, RemoteStageError
from fxpipe.runtime.control.ballot import Ballot, SilentReplicaError, ballot_of
from fxpipe.runtime.parameters.sync import GradSync
from fxpipe.runtime.wire.communicators import backend_of
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import close_connections

__all__ = ["Replicas"]

_HEADER = 3  # flags before those of parameters: failed, reduces, does not reduce

_SILENT: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


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

    def begin(self, earlier: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
        """Begin the step, if it has not begun; see `GradSync.begin`.

        Raises:
            RemoteStageError: a replica was silent in an earlier step.
        """
        if self._begun:
            return
        for group in self._groups:
            if group in _SILENT:
                raise RemoteStageError(f"{_SILENT[group]} in an earlier step; make the groups anew")
        self._begun = True
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
                _leave(group, str(error))
                raise
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
        """Wait for a collective of the replicas, at most until the step's deadline."""
        assert work is not None
        try:
            work.wait(self._deadline.timeout)
        except RuntimeError as error:
            _leave(group, f"a data-parallel replica of this stage did not answer: {error}")
            raise RemoteStageError(_SILENT[group]) from error

    def give_up(self, message: str) -> None:
        """This replica has failed: vote so, unless it has voted, and do not wait."""
        if self._has_voted:
            return
        self._has_voted = True
        for group in self._groups:
            if group in _SILENT:
                continue
            flags = [s.used() for s in self._syncs if any(g is group for g in s.groups)]
            failed = [True] + [False] * (_HEADER - 1 + sum(map(len, flags)))
            try:
                ballot = ballot_of(group, self._deadline)
                ballot.cast(failed, message or "unknown", self._deadline)
            except SilentReplicaError as error:
                _leave(group, str(error))


def _leave(group: dist.ProcessGroup, why: str) -> None:
    """Collectives that not all replicas make are open in this group: nobody must use it again.

    A later one would be taken for the answer, and whoever frees the group would wait for it.
    """
    _SILENT[group] = why
    if backend_of(group, torch.device("cpu")) == "gloo":
        close_connections(group)
