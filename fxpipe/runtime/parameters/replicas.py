"""Let the data-parallel replicas of a pipeline's stages go on together, or fail together.

Replicas meet in collectives, which wait for everybody. So a replica that fails still does every
collective that its program owes (see `executor.drain`), with whatever gradients it has; one that
cannot closes the groups, which wakes the others (`break_off`). An evaluation gathers shards and
reduces nothing: only replicas that share parameters out take part, and vote alike. When a
step begins, the replicas start to compare what they will reduce. They look at the outcome before
the first reduction, when it has long arrived, and none reduces if it is not the same for all. Once
a step, after all collectives have begun and before any result is used, the replicas vote: one
all-reduce of two bytes per group says whether all succeeded, and whether any has not used all of
its parameters. If one has failed, all raise; the words follow only then.

Votes have groups of their own. A replica that does not vote in time is an error for good: nobody
knows which vote it would answer later. Whatever waits for a replica, here or in the library that
wraps a stage, is woken when the step's time is over (see `lost_groups`).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import InputError, RemoteStageError
from fxpipe.runtime.control.ballot import BALLOTS, REPLICA, Ballot, SilentReplicaError, ballot_of
from fxpipe.runtime.control.dry_run import is_fake
from fxpipe.runtime.parameters.ddp import Earlier
from fxpipe.runtime.parameters.lost_groups import (
    Limit,
    asked,
    check_groups,
    collective_of,
    explained,
    is_lost,
    leave,
)
from fxpipe.runtime.parameters.sync import GradSync, divide_shared
from fxpipe.runtime.wire.failure import Deadline, in_words

__all__ = ["Replicas"]

_GRACE = 2.0  # seconds for collectives that all replicas have begun
_FAILED = -1  # like no other number that is compared


class Replicas:
    """The replicas of the stages of this process, for one step."""

    def __init__(
        self, syncs: Sequence[GradSync], seconds: float, *, trains: bool, reduces: bool
    ) -> None:
        # Stages of several rounds have one module.
        every = {id(sync): sync for sync in syncs if trains or sync.is_sharded}
        self._syncs = list(every.values())
        self._trains, self._reduces = trains, trains and reduces
        self._begun = False
        self._deadline = Deadline(seconds)
        self._opened: dict[dist.ProcessGroup, Callable[[], bool]] = {}
        self._are_same: bool | None = None
        self._voted: list[dist.ProcessGroup] = []
        found = [g for s in self._syncs for g in (s.groups if trains else s.gathers_over)]
        groups = {id(group): group for group in found if group.size() > 1 and not is_fake(group)}
        self._groups = list(groups.values())
        self._limit = Limit(self._groups)

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that may wait for a replica."""
        if self._reduces or any(sync.is_sharded for sync in self._syncs):
            return self._limit.during(self._deadline, REPLICA)
        return contextlib.nullcontext()

    def begin(self, earlier: Earlier) -> None:
        """Begin the step, if it has not begun; see `GradSync.begin`.

        Raises:
            RemoteStageError: a replica was silent in an earlier step.
        """
        if self._begun:
            return
        check_groups(self._groups)
        self._begun = True
        divide_shared(self._syncs)
        try:
            for sync in self._syncs:
                sync.begin(earlier, reduces=self._reduces, may_reduce=self._may_reduce)
            for group in self._groups:
                trained = [sync for sync in self._of(group) if self._trains]
                what = [(sync.trained.digest, sync.reduces) for sync in trained]
                self._open(group, zlib.crc32(repr(what).encode()))
        except BaseException as error:  # its collectives cannot be made, and others wait for them
            self.break_off(in_words(error))
            raise

    def begin_failed(self) -> None:
        """Begin the step, if it has not begun, of a replica that has failed before: none reduces.

        Nobody would take back what the others' gradients add to this one's.

        Raises:
            RemoteStageError: a replica was silent in an earlier step.
        """
        if self._begun:
            return
        check_groups(self._groups)
        self._begun, self._are_same = True, False
        for sync in self._syncs:
            sync.begin({}, reduces=self._reduces, may_reduce=self._may_reduce)
        for group in self._groups:
            self._open(group, _FAILED)

    def _open(self, group: dist.ProcessGroup, digest: int) -> None:
        """Begin to compare what this replica will reduce with the others."""
        with asked(group):
            ballot = ballot_of(group, self._deadline)
            self._opened[group] = ballot.open(digest, self._deadline)

    def _of(self, group: dist.ProcessGroup) -> list[GradSync]:
        return [sync for sync in self._syncs if any(one is group for one in sync.groups)]

    def _may_reduce(self) -> bool:
        """Whether all replicas would reduce the same; False after an error, too."""
        if self._are_same is None:
            self._are_same = False
            found = []
            for group, is_same in self._opened.items():
                with asked(group):
                    found.append(is_same())
            self._are_same = all(found)
        return self._are_same

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
            InputError: the replicas would not reduce the same; none has reduced.
        """
        flags: dict[int, tuple[list[bool], list[bool]]] = {id(s): ([], []) for s in self._syncs}
        if self._trains:
            flags = {id(sync): (sync.used(), sync.left()) for sync in self._syncs}
        for group in self._groups:
            self._voted.append(group)
            with asked(group):
                self._vote(group, ballot_of(group, self._deadline), flags)
        if not self._trains:
            return
        self._limit.set(max(self._deadline.left(), _GRACE), "the results of replicas did not come")
        for sync in self._syncs:
            sync.finish(*flags[id(sync)], self._wait)

    def _vote(
        self,
        group: dist.ProcessGroup,
        ballot: Ballot,
        flags: dict[int, tuple[list[bool], list[bool]]],
    ) -> None:
        """Let all replicas succeed or none, and put what any has flagged in the flags' place."""
        syncs = self._of(group)
        is_same = self._opened[group]()
        is_usual = all(all(used) and not any(left) for used, left in (flags[id(s)] for s in syncs))
        failed, is_unusual = ballot.vote([False, not is_usual], self._deadline)
        if failed:
            words = ballot.said() or "it left no message"
            raise RemoteStageError(f"{REPLICA} failed: {words}")
        if not is_same:
            raise self._unlike(syncs, ballot)
        if is_unusual:
            mine = [flag for sync in syncs for some in flags[id(sync)] for flag in some]
            rest = iter(ballot.vote(mine, self._deadline))
            for sync in syncs:
                used, left = flags[id(sync)]
                flags[id(sync)] = [next(rest) for _ in used], [next(rest) for _ in left]

    def _unlike(self, syncs: Sequence[GradSync], ballot: Ballot) -> InputError:
        mine = "evaluates"
        if self._trains:
            mine = "; ".join(
                f"{'reduces' if one.reduces else 'does not reduce'} the gradients of {one.trained}"
                for one in syncs
            )
        said = ballot.compare(mine, self._deadline)
        shown = "\n".join(f"  replica {rank}: {words}" for rank, words in enumerate(said))
        return InputError(
            "data-parallel replicas of this stage must reduce the same gradients in a step: freeze "
            "the same parameters, and use no_sync() and finalize_gradients alike, on all of them\n"
            + shown
        )

    @property
    def has_groups(self) -> bool:
        return bool(self._groups)

    def any(self, flag: bool) -> bool:
        """Whether it is so for any replica of any stage of this process."""
        for group in self._groups:
            with asked(group):
                flag = ballot_of(group, self._deadline).vote([flag], self._deadline)[0]
        return flag

    def mean(self, number: torch.Tensor) -> torch.Tensor:
        """The mean of a number over the replicas of this process's first stage that has some."""
        groups = next((sync.groups for sync in self._syncs if sync.groups), ())
        for group in [group for group in groups if group.size() > 1]:
            with collective_of([group]):
                dist.all_reduce(number, group=group)
            number = number / group.size()
        return number

    def _wait(self, work: dist.Work | None, group: dist.ProcessGroup) -> None:
        """Wait for a collective of the replicas."""
        assert work is not None
        with collective_of([group]):
            work.wait()

    def explained(self, error: BaseException) -> BaseException:
        """What an error in a stage means, where a sharded stage waits for its replicas itself."""
        found = explained(error, [g for s in self._syncs if s.is_sharded for g in s.groups])
        if isinstance(found, SilentReplicaError):
            for group in self._groups:
                words = (
                    BALLOTS[group].said(has_voted=group in self._voted) if group in BALLOTS else ""
                )
                if words:
                    return RemoteStageError(f"{REPLICA} failed: {words}").with_traceback(
                        found.__traceback__
                    )
        return found

    def give_up(self, message: str) -> None:
        """This replica has failed: vote so, where it has not voted, and do not wait."""
        for group in self._groups:
            if is_lost(group) or group in self._voted:
                continue
            self._voted.append(group)
            with contextlib.suppress(SilentReplicaError), asked(group):
                ballot = ballot_of(group, self._deadline)
                ballot.say(message)
                ballot.cast([True, False], self._deadline)

    def break_off(self, message: str) -> None:
        """This replica makes no more collectives and votes: wake who waits for it, now or later."""
        for group in self._groups:
            if not is_lost(group):
                with contextlib.suppress(SilentReplicaError):
                    ballot_of(group, Deadline(_GRACE)).close(message)
                leave(group, f"this replica has failed: {message}")
