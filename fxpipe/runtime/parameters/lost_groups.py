"""Groups of replicas and partners that nobody must use again, and what makes a group one of them.

Collectives that not all ranks make stay open: a later one would be taken for the answer, and
whoever frees the group would wait for it. So a group is given up for good, and its connections
are closed, which wakes everybody who waits in it.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import RemoteStageError
from fxpipe.runtime.control.ballot import REPLICA, SilentReplicaError
from fxpipe.runtime.wire.communicators import backend_of
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import close_connections

__all__ = [
    "Limit",
    "asked",
    "blocks",
    "check_groups",
    "collective_of",
    "explained",
    "is_lost",
    "leave",
]

_TOO_SHORT = (
    "the limit of the replicas' own process group: if they only need longer, make that group with "
    "a longer timeout"
)
_LOST: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def leave(group: dist.ProcessGroup, why: str) -> None:
    """Give a group up."""
    _LOST.setdefault(group, why)
    if blocks(group):
        close_connections(group)


def is_lost(group: dist.ProcessGroup) -> bool:
    return group in _LOST


def check_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuse to go on with a group that was given up.

    Raises:
        RemoteStageError: one of them was.
    """
    for group in groups:
        if group in _LOST:
            raise RemoteStageError(f"{_LOST[group]} in an earlier step; make the groups anew")


@contextlib.contextmanager
def asked(group: dist.ProcessGroup) -> Iterator[None]:
    """Around a question to all ranks of a group: with one that is silent it is given up."""
    try:
        yield
    except SilentReplicaError as error:
        leave(group, str(error))
        raise


@contextlib.contextmanager
def collective_of(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Around collectives and nothing else: what fails in them is a replica that does not answer."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _silence(groups, error) from error


def explained(error: BaseException, groups: Sequence[dist.ProcessGroup]) -> BaseException:
    """What an error of a stage means if a collective raised it that its wrapper has made."""
    where = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    if (
        not groups
        or type(error) is not RuntimeError
        or where[-1:] != [dist.distributed_c10d.__name__]
    ):
        return error
    found = _silence(groups, error)
    found.__cause__ = error
    return found


def _silence(groups: Sequence[dist.ProcessGroup], error: Exception) -> SilentReplicaError:
    why = f"{REPLICA} did not answer: {str(error).splitlines()[0]}"
    if "imed out" in why:  # a step that takes too long closes the group, which says so already
        why += f" ({_TOO_SHORT})"
    for group in groups:
        leave(group, why)
    return SilentReplicaError(next((_LOST[group] for group in groups), why))


class Limit:
    """Gives groups up when their time is over; only those whose collectives stop the host."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [group for group in groups if blocks(group)]
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def during(self, deadline: Deadline, who: str) -> Iterator[None]:
        """Around everything that may wait for the other ranks of the groups."""
        # A little sooner than the pipeline, whose other ranks only see that this one waits.
        seconds = 0.9 * deadline.left()
        self.set(seconds, f"{who} did not answer within {seconds:.2g} s")
        try:
            yield
        finally:
            self.clear()

    def set(self, seconds: float, why: str) -> None:
        self.clear()
        if self._groups:
            self._timer = threading.Timer(seconds, self._leave, (why,))
            self._timer.daemon = True
            self._timer.start()

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self, why: str) -> None:
        for group in self._groups:
            leave(group, why)


def blocks(group: dist.ProcessGroup) -> bool:
    """Whether to wait for a collective stops the host; else only a device waits."""
    return backend_of(group, torch.device("cpu")) == "gloo"
