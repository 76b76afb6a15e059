"""Run one rank of a pipeline whose other ranks do not exist: torch's "fake" process group.

In:  a process group of the backend "fake", of any size.
Out: a `Control` and a `Transport` that never wait. The other ranks say what this one says, what is
     sent is dropped, and what is received are zeros of the agreed shape.

Numbers are therefore meaningless beyond this rank's first receive; shapes, memory, the order of
actions and the program are those of a real run. With fake tensors nothing is computed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.runtime.control.control import Control
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import Incoming, TensorShape

__all__ = ["DryControl", "DryTransport", "is_fake"]


def is_fake(group: Any) -> bool:
    """Whether the ranks of a group are made up."""
    return isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "fake"


class DryControl(Control):
    """The other ranks agree to everything."""

    is_dry = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return (tuple(numbers),) * self.size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


class _Zeros:
    def __init__(self, peer: int, tensors: list[torch.Tensor]) -> None:
        self.peer = peer
        self._tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        return self._tensors


class DryTransport:
    """Drops what is sent and makes up what is received."""

    def begin(self, deadline: Deadline, number: int) -> None: ...

    def send(self, peer: int, tensors: Sequence[torch.Tensor], lane: int = 0) -> None: ...

    def recv(
        self, peer: int, shapes: Sequence[TensorShape], device: torch.device, lane: int = 0
    ) -> Incoming:
        return _Zeros(peer, [torch.zeros(s, dtype=dtype, device=device) for s, dtype in shapes])

    def release(self, handle: Any) -> None: ...

    def held(self) -> int:
        return 0

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...
