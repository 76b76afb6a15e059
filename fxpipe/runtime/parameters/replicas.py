"""Let the data-parallel replicas of a stage learn that one of them has failed.

Replicas meet in collectives only: one that never comes leaves the others waiting until their
time-out. So each collective of a stage is preceded by a small exchange, in which every
replica says whether it goes on. One that has failed says so once for each exchange it still
owes, and why, without waiting for an answer; the others raise, and their own pipelines with
them. An exchange is one all-reduce of a few bytes; the words follow only after a failure.

A replica that does not answer in time is an error for good: nobody knows which exchange it
would answer later.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import RemoteStageError
from fxpipe.runtime.control.group_control import side_group
from fxpipe.torch_inside import backend_object

__all__ = ["Replicas"]

_BYTES = 512  # of what one replica says: two for the length of its message, then that


class Replicas:
    """The replicas of one stage, on this rank.

    `owes` is how many exchanges a step has, `flags` how many bits each carries; `begin`
    starts the count.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        distinct = list({id(group): group for group in groups}.values())
        self._groups = [_on_cpu(group) for group in distinct if group.size() > 1]
        self._left = 0
        self._flags = 0
        self._until = 0.0
        self._seconds = 0.0
        self._silent = ""
        self._said: list[tuple[dist.Work, object]] = []
        self.owes = 1

    def begin(self, seconds: float, flags: int = 0) -> None:
        """Begin a step in which no wait is longer than `seconds`.

        Raises:
            RemoteStageError: a replica was silent in an earlier step.
        """
        if self._silent:
            raise RemoteStageError(f"{self._silent} in an earlier step; make the groups anew")
        self._left, self._flags = self.owes, flags
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._said = [said for said in self._said if not said[0].is_completed()]

    def check(self, flags: Sequence[bool] = ()) -> list[bool]:
        """Before a collective: go on if all replicas do. Which flags any replica has set.

        Raises:
            RemoteStageError: one of them has failed, or does not answer.
        """
        self._left -= 1
        found = torch.tensor([False, *flags], dtype=torch.uint8, device="cpu")
        for group in self._groups:
            work = dist.all_reduce(found, dist.ReduceOp.MAX, group=group, async_op=True)
            self.wait(work)
            if found[0]:
                raise RemoteStageError(
                    f"a data-parallel replica of this stage failed: {self._words(group)}"
                )
        return [bool(flag) for flag in found[1:].tolist()]

    def _words(self, group: dist.ProcessGroup) -> str:
        said = [torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for _ in range(group.size())]
        self.wait(dist.all_gather(said, _written(""), group=group, async_op=True))
        return next(filter(None, map(_read, said)), "it left no message")

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective of the replicas, at most until the step's deadline.

        Raises:
            RemoteStageError: one of them does not answer.
        """
        assert work is not None
        left = max(self._until - time.monotonic(), 0.01)
        try:
            work.wait(datetime.timedelta(seconds=left))
        except RuntimeError as error:
            silent = f"a data-parallel replica of this stage did not answer: {error}"
            if time.monotonic() >= self._until - 0.1:
                silent = (
                    "a data-parallel replica of this stage did not answer within "
                    f"{self._seconds:g} s"
                )
            self._silent, self._left = silent, 0
            raise RemoteStageError(silent) from error

    def give_up(self, message: str) -> None:
        """This replica has failed: say so wherever the others wait for it in this step."""
        for _ in range(self._left):
            for group in self._groups:
                failed = torch.zeros(1 + self._flags, dtype=torch.uint8, device="cpu")
                failed[0] = 1
                self._say(dist.all_reduce(failed, dist.ReduceOp.MAX, group, True), failed)
                mine = _written(message or "unknown")
                said = [torch.zeros_like(mine) for _ in range(group.size())]
                self._say(dist.all_gather(said, mine, group, True), (mine, said))
        self._left = 0

    def _say(self, work: dist.Work | None, memory: object) -> None:
        assert work is not None
        self._said.append((work, memory))  # kept until it has been heard


def _on_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group if gloo carries its CPU tensors, or another of the same ranks where it does."""
    try:
        is_gloo = backend_object(group, torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        is_gloo = False
    return group if is_gloo else side_group(group)


def _written(message: str) -> torch.Tensor:
    text = message.encode()[: _BYTES - 2]
    data = len(text).to_bytes(2, "little") + text
    return torch.frombuffer(bytearray(data.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def _read(said: torch.Tensor) -> str:
    data = bytes(said.tolist())
    return data[2 : 2 + int.from_bytes(data[:2], "little")].decode(errors="replace")
