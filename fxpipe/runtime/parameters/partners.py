"""Let the ranks that hold parts of the same stage go on together, or fail together.

Tensor-parallel ranks meet in collectives in the middle of a forward or a backward. Nobody can make
those for one that has failed, so the others would stay in them. At the end of a step the partners
vote. Who fails votes at once, and says why; if a partner has not voted soon after that, it waits in
a collective, and the group is given up, which wakes it. If all have voted, nobody waits, and the
group can be used again.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from fxpipe.errors import RemoteStageError
from fxpipe.runtime.control.ballot import SilentReplicaError, ballot_of
from fxpipe.runtime.parameters.lost_groups import Limit, asked, blocks, check_groups, leave
from fxpipe.runtime.parameters.sync import grad_sync
from fxpipe.runtime.wire.failure import Deadline

__all__ = ["Partners", "partner_groups"]

_SOON = 5.0  # seconds in which a partner votes that does not wait in a collective
_WHO = "a rank that shares this stage"
_UNLIKE = (
    "the ranks that share a stage must make the same call: the same step or eval, with inputs, "
    "modes and hooks that are new to all of them or to none"
)
_FAILED = -1  # like no other number that is compared


def partner_groups(
    modules: Sequence[nn.Module], tp_group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """The groups over which modules are spread, without those of their replicas."""
    found = {} if tp_group is None else {id(tp_group): tp_group}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            mesh = getattr(tensor, "device_mesh", None)
            if mesh is not None:
                with contextlib.suppress(RuntimeError):  # a mesh of groups that were destroyed
                    found.update((id(group), group) for group in mesh.get_all_groups())
    for group in (group for module in modules for group in grad_sync(module).groups):
        found.pop(id(group), None)
    return [group for group in found.values() if group.size() > 1]


class Partners:
    """The ranks that hold other parts of this process's stages, for one step."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], seconds: float) -> None:
        self._groups = groups
        self._deadline = Deadline(seconds)
        self._limit = Limit(groups)
        self._compared: list[dist.ProcessGroup] = []
        self._has_voted = False

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that may wait for a partner."""
        return self._limit.during(self._deadline, _WHO)

    def begin(self) -> None:
        """Meet, if the partners have not met.

        Raises:
            RemoteStageError: one of them does not come, or was silent in an earlier step.
        """
        check_groups(self._groups)
        for group in self._groups:
            with asked(group):
                ballot_of(group, self._deadline, _WHO)

    def compare(self, *what: bool) -> str:
        """Compare what the partners do in this step: their collectives would mix otherwise.

        Returns why it cannot be done, or nothing.

        Raises:
            RemoteStageError: one of them does not answer.
        """
        ballots = []
        # In all groups first: who waits in one might not come to another.
        for group in self._groups:
            with asked(group):
                ballot = ballot_of(group, self._deadline, _WHO)
                is_same = ballot.open(zlib.crc32(bytes(what)), self._deadline)
            self._compared.append(group)
            ballots.append((group, ballot, is_same))
        found = ""
        for group, ballot, is_same in ballots:
            with asked(group):
                if not is_same():
                    words = ballot.said(has_voted=False)
                    found = f"{_WHO} failed: {words}" if words else found or _UNLIKE
        return found

    def restart(self) -> None:
        """The step runs, maybe once more: each run has a vote."""
        self._has_voted = False

    def finish(self) -> None:
        """Vote: this rank has succeeded.

        Raises:
            RemoteStageError: a partner has failed, or does not answer.
        """
        self._has_voted = True
        failed: list[str] = []
        for group in self._groups:
            with asked(group):
                ballot = ballot_of(group, self._deadline, _WHO)
                if ballot.vote([False, True], self._deadline)[0]:
                    failed.append(ballot.said() or "it left no message")
                    self._check_device(group, failed[0])
        if failed:
            raise RemoteStageError(f"{_WHO} failed: {failed[0]}")

    def tell(self, message: str) -> None:
        """Vote, unless this rank has: it has failed. Wake who waits for it in a collective."""
        if self._has_voted:
            return
        self._has_voted = True
        for group in self._groups:  # one that was given up, too: partners may not know of it
            try:
                ballot = ballot_of(group, Deadline(min(self._deadline.left(), _SOON)), _WHO)
                ballot.say(message)
                if group not in self._compared:
                    ballot.open(_FAILED, self._deadline)
                _, succeeded = ballot.cast([True, False], self._deadline)(Deadline(_SOON))
            except SilentReplicaError:
                leave(group, f"this rank has failed: {message}")
            else:
                if succeeded:
                    self._check_device(group, message)

    def _check_device(self, group: dist.ProcessGroup, message: str) -> None:
        """Collectives that do not stop the host may still be open on the device."""
        if not blocks(group):
            leave(group, f"{_WHO} failed: {message}")

    def explained(self, error: BaseException) -> BaseException:
        """What an error in a stage means if a partner has failed before."""
        if not isinstance(error, RuntimeError) or isinstance(error, RemoteStageError):
            return error
        for group in self._groups:
            with contextlib.suppress(SilentReplicaError):
                ballot = ballot_of(group, Deadline(_SOON), _WHO)
                words = "" if self._has_voted else ballot.said(has_voted=False)
                if words:
                    found = RemoteStageError(f"{_WHO} failed: {words}")
                    leave(group, str(found))
                    found.__cause__ = error
                    return found
        return error
