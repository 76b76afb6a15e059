"""Let the data-parallel replicas of a pipeline's stages go on together, or fail together.

Replicas meet in collectives, which wait for everybody. So a replica that fails still does every
collective that its program owes (see `executor.drain`), with whatever gradients it has. Once a
step, after all collectives have begun and before any result is used, the replicas vote: one
all-reduce of a few bytes per group says whether all succeeded, whether all reduce, and which
parameters any of them has used. If one has failed, all raise; the words follow only then.

Votes have groups of their own. A replica that does not vote in time is an error for good: nobody
knows which vote it would answer later.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import MutableMapping, Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import InputError, RemoteStageError
from fxpipe.runtime.control.group_control import side_group
from fxpipe.runtime.parameters.sync import GradSync
from fxpipe.runtime.wire.failure import Deadline

__all__ = ["Replicas"]

_BYTES = 512  # of what one replica says: two for the length of its message, then that
_HEADER = 3  # flags before those of parameters: failed, reduces, does not reduce

_SILENT: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
# Kept until it has been heard, with its groups: who frees a group waits for its open collectives.
_SAID: list[tuple[dist.Work, object]] = []


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
        _SAID[:] = [said for said in _SAID if not said[0].is_completed()]
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
            used = self._vote(group, used)
        for sync, flags in zip(self._syncs, used, strict=True):
            sync.finish(flags, self._wait)

    def _vote(self, group: dist.ProcessGroup, used: list[list[bool]]) -> list[list[bool]]:
        takes_part = [any(g is group for g in sync.groups) for sync in self._syncs]
        reduces = [s.reduces for s, is_in in zip(self._syncs, takes_part, strict=True) if is_in]
        mine = [flags for flags, is_in in zip(used, takes_part, strict=True) if is_in]
        header = [False, any(reduces), not all(reduces)]
        found = _bits([*header, *(flag for flags in mine for flag in flags)])
        side = side_group(group)
        self._wait(dist.all_reduce(found, dist.ReduceOp.MAX, side, async_op=True), group)
        failed, some_reduce, some_do_not, *flags = map(bool, found.tolist())
        if failed:
            raise RemoteStageError(
                f"a data-parallel replica of this stage failed: {self._words(group)}"
            )
        if some_reduce and some_do_not:
            raise InputError(
                "some data-parallel replicas reduce the gradients of this step and some do not: "
                "finalize_gradients and no_sync() must be the same on all of them"
            )
        rest = iter(flags)
        return [
            [next(rest) for _ in known] if is_in else known
            for known, is_in in zip(used, takes_part, strict=True)
        ]

    def _words(self, group: dist.ProcessGroup) -> str:
        said = [torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for _ in range(group.size())]
        side = side_group(group)
        self._wait(dist.all_gather(said, _written(""), group=side, async_op=True), group)
        return next(filter(None, map(_read, said)), "it left no message")

    def _wait(self, work: dist.Work | None, group: dist.ProcessGroup) -> None:
        """Wait for a collective of the replicas, at most until the step's deadline."""
        assert work is not None
        try:
            work.wait(datetime.timedelta(seconds=max(self._deadline.left(), 0.01)))
        except RuntimeError as error:
            silent = f"a data-parallel replica of this stage did not answer: {error}"
            if self._deadline.left() < 0.1:
                silent = (
                    "a data-parallel replica of this stage did not answer within "
                    f"{self._deadline.seconds:g} s"
                )
            _SILENT[group] = silent
            _say(work, (group, side_group(group)))
            raise RemoteStageError(silent) from error

    def give_up(self, message: str) -> None:
        """This replica has failed: vote so, unless it has voted, and do not wait."""
        if self._has_voted:
            return
        self._has_voted = True
        for group in self._groups:
            if group in _SILENT:
                continue
            flags = [s.used() for s in self._syncs if any(g is group for g in s.groups)]
            failed = _bits([True] + [False] * (_HEADER - 1 + sum(map(len, flags))))
            side = side_group(group)
            work = dist.all_reduce(failed, dist.ReduceOp.MAX, side, async_op=True)
            _say(work, (group, side, failed))
            mine = _written(message or "unknown")
            said = [torch.zeros_like(mine) for _ in range(group.size())]
            _say(dist.all_gather(said, mine, side, async_op=True), (group, side, mine, said))


def _say(work: dist.Work | None, memory: object) -> None:
    assert work is not None
    _SAID.append((work, memory))


def _bits(flags: Sequence[bool]) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.uint8, device="cpu")


def _written(message: str) -> torch.Tensor:
    text = message.encode()[: _BYTES - 2]
    data = len(text).to_bytes(2, "little") + text
    return torch.frombuffer(bytearray(data.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def _read(said: torch.Tensor) -> str:
    data = bytes(said.tolist())
    return data[2 : 2 + int.from_bytes(data[:2], "little")].decode(errors="replace")
