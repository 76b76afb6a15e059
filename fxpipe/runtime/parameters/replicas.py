"""Let the data-parallel replicas of a stage learn that one of them has failed.

Replicas meet in collectives only: one that never comes leaves the others waiting until their
time-out. So each collective of a stage is preceded by a small exchange, in which every
replica says whether it goes on. One that has failed says so once for each exchange it still
owes, without waiting for an answer; the others raise, and their own pipelines with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import RemoteStageError
from fxpipe.runtime.wire.control import side_group

__all__ = ["Replicas"]

_BYTES = 512  # of what one replica says: two for the length of its message, then that


class Replicas:
    """The replicas of one stage, on this rank.

    `owes` is how many exchanges a step has; `begin` starts the count.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [_on_cpu(group) for group in groups if group.size() > 1]
        self._left = 0
        self._said: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        self.owes = 1

    def begin(self) -> None:
        self._left = self.owes
        self._said = [said for said in self._said if not said[0].is_completed()]

    def check(self) -> None:
        """Before a collective: go on if all replicas do.

        Raises:
            RemoteStageError: one of them has failed.
        """
        self._left -= 1
        message = ""
        for group in self._groups:
            found = [torch.zeros(_BYTES, dtype=torch.uint8) for _ in range(group.size())]
            dist.all_gather(found, _written(message), group=group)
            message = message or next(filter(None, map(_read, found)), "")
        if message:
            raise RemoteStageError(f"a data-parallel replica of this stage failed: {message}")

    def give_up(self, message: str) -> None:
        """This replica has failed: say so wherever the others wait for it in this step."""
        for _ in range(self._left):
            for group in self._groups:
                mine = _written(message or "unknown")
                found = [torch.zeros_like(mine) for _ in range(group.size())]
                work = dist.all_gather(found, mine, group=group, async_op=True)
                assert work is not None
                self._said.append((work, mine, found))  # kept until it has been heard
        self._left = 0


def _on_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group if it can carry CPU tensors, or another of the same ranks that can."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return side_group(group)
    return group


def _written(message: str) -> torch.Tensor:
    text = message.encode()[: _BYTES - 2]
    data = len(text).to_bytes(2, "little") + text
    return torch.frombuffer(bytearray(data.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def _read(said: torch.Tensor) -> str:
    data = bytes(said.tolist())
    return data[2 : 2 + int.from_bytes(data[:2], "little")].decode(errors="replace")
