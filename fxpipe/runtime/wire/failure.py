"""What went wrong on a rank, in words that every rank can be told, and how long to wait.

A `Failure` is plain data. Kind "error" is a failure that all ranks get over together: they finish
the transfers they owe, raise, and can make the next call. Any other kind is final: a rank is gone
("lost"), does not answer ("hang"), or was stopped between two messages ("broken").
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe import errors
from fxpipe.errors import FxpipeError, RemoteStageError

__all__ = ["Deadline", "Failure", "described", "in_words", "note", "raise_problems", "remote_error"]

LONGEST = 8000
"""Characters of a message that the other ranks are told."""


class Deadline:
    """When a call has to be over; every wait in it takes what is left."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def timeout(self) -> datetime.timedelta:
        """What is left, for torch, which takes no time for no limit."""
        return datetime.timedelta(seconds=max(self.left(), 0.01))


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong first, and where. `rank` failed; another rank may have noticed."""

    rank: int
    type: str = ""
    message: str = ""
    kind: str = "error"
    stage: int | None = None
    microbatch: int | None = None
    action: str = ""

    @property
    def is_final(self) -> bool:
        """Whether no further call can be made."""
        return self.kind != "error"

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.stage is not None:
            where += f", stage {self.stage}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}"
        if self.action:
            where += f", action {self.action}"
        return f"{where}: {self.type}: {self.message}"


def remote_error(failure: Failure, more: str = "") -> RemoteStageError:
    """The exception for the ranks that did not fail themselves."""
    text = f"another rank failed: {failure}"
    return RemoteStageError(
        f"{text}\n{more}" if more else text,
        rank=failure.rank,
        stage=failure.stage,
        microbatch=failure.microbatch,
        action=failure.action,
    )


def described(error: BaseException) -> tuple[str, str]:
    """Type and message of any exception, also of one whose `__str__` fails; never too long."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException as inner:
        text = f"(its message cannot be shown: __str__ raised {type(inner).__name__})"
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}... ({len(text)} characters in all)"
    return kind, text


def in_words(error: BaseException) -> str:
    """Type and message in one line."""
    return "{}: {}".format(*described(error))


def note(error: BaseException, text: str) -> None:
    """Add a note, unless the exception refuses notes."""
    try:
        error.add_note(text)
    except Exception:
        return


def raise_problems(found: Sequence[tuple[str, str] | None], problem: BaseException | None) -> None:
    """Raise if any rank has a problem; `found` has type and message by rank, ours is `problem`.

    fxpipe's own errors are raised with their type on every rank; a user's exception is raised as
    it is where it happened, and as RemoteStageError elsewhere.
    """
    bad = [(rank, *what) for rank, what in enumerate(found) if what is not None]
    if not bad:
        return
    if problem is not None and (len(bad) == 1 or not isinstance(problem, FxpipeError)):
        raise problem
    rank, kind, message = bad[0]
    several = len({text for _, _, text in bad}) > 1
    text = "\n".join(f"rank {r}: {m}" for r, _, m in bad) if several else message
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, FxpipeError):
        if known is RemoteStageError:
            raise RemoteStageError(text, rank=rank)
        raise known(text if several else f"{text} (found on rank {rank})")
    raise RemoteStageError(f"another rank failed: rank {rank}: {kind}: {message}", rank=rank)
