"""How the ranks of a pipeline agree. Here: all of them are in this process, so nobody is asked.

`GroupControl` does the same for the ranks of a process group.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpipe.errors import FxpipeError, InputError, RemoteStageError
from fxpipe.program.play.queues import Streams
from fxpipe.runtime.wire.failure import Deadline, Failure, described, raise_problems, remote_error
from fxpipe.runtime.wire.transport import TransportError

__all__ = ["CALLS", "Control", "agree", "agree_on", "bits_of", "check_same", "number_of"]

CALLS = (
    *("nothing", "step", "eval", "clip_grad_norm_"),
    *("save_checkpoint", "load_checkpoint", "save_weights", "shared_loss", "generate", "scaler"),
    *("accumulate", "eval_stream", "callbacks"),
)
"""What all ranks must call together. The place of a name is its number in messages."""


class Control:
    """Agreement of ranks that are all in this process."""

    rank = 0
    size = 1
    is_dry = False
    """Whether the other ranks are made up."""
    failure: Failure | None = None
    """What went wrong in this call, here or elsewhere."""
    explain: Callable[[BaseException], BaseException] = staticmethod(lambda error: error)
    """What an error of a stage means, where others may be the cause; set for each call."""
    raises_everywhere = True
    """Whether what this rank raises is known to all: set by who lets all ranks raise together."""

    @contextlib.contextmanager
    def call(
        self, name: str, schedule: int, deadline: Deadline, status: Callable[[], str]
    ) -> Iterator[None]:
        """Around one of `CALLS`. What leaves it and is not raised by all ranks breaks the group.

        Raises:
            RemoteStageError: an earlier call has broken the connection to the other ranks.
        """
        self.begin(name, schedule, deadline, status)
        try:
            yield
        except BaseException as error:
            if not self.raises_everywhere:  # the others go on, and would wait
                failure = self.failure  # that this rank could not get over
                if failure is None:
                    failure = Failure(self.rank, *described(error))
                self.give_up(replace(failure, kind="broken"))
            raise
        finally:
            self.end()

    def begin(
        self, call: str, schedule: int, deadline: Deadline, status: Callable[[], str]
    ) -> None:
        self.failure = None

    def end(self) -> None: ...

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Every rank's numbers, by rank. Every call begins with one.

        Raises:
            InputError: on all ranks, which make different calls.
        """
        return (tuple(numbers),)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; plain data only, see `plain`."""
        return [value]

    @contextlib.contextmanager
    def alike(self, own: BaseException | None = None) -> Iterator[None]:
        """Around checks of what all ranks have said: they fail everywhere, or nowhere.

        `own` is an exception of this rank's own that the others have been told.
        """
        try:
            yield
        except BaseException as error:
            if error is own or isinstance(error, FxpipeError):
                self.raises_everywhere = True
            raise

    def report(self, failure: Failure) -> Failure:
        """Tell all ranks of a failure; the first one of a call wins and is returned."""
        self.failure = self.failure or failure
        return self.failure

    def settled(self) -> Failure | None:
        """All ranks know of the failure of this call and got over it; returns it."""
        known, self.failure = self.failure, None
        return known

    def give_up(self, failure: Failure) -> None:
        """Stop talking to the other ranks, for good."""
        self.failure = failure

    def streams(self, device: torch.device) -> Streams | None:
        """What shares a queue on the way of tensors on `device`; None if nothing does."""
        return None

    def lost(self, error: TransportError, where: Failure | None = None) -> RemoteStageError:
        """Find out who is gone or silent after a transfer failed, and tell everybody."""
        raise AssertionError("a transfer within one process failed") from error

    def final(self, failure: Failure) -> RemoteStageError:
        """What to raise for a final failure; says what every rank does if one is silent."""
        return remote_error(failure)


def agree(control: Control, problem: BaseException | None) -> None:
    """All ranks come here; if any has a problem, all raise."""
    told = control.gather(None if problem is None else described(problem))
    with control.alike(problem):
        raise_problems(told, problem)


def agree_on(
    control: Control, what: str, value: Any, problem: BaseException | None = None, more: Any = None
) -> list[Any]:
    """All ranks come here; they must have the same value. What each says beside it.

    Raises:
        InputError: on all ranks: they have different values.
        the problem of this rank, where it has one; RemoteStageError on the other ranks.
    """
    said = control.gather((None if problem is None else described(problem), value, more))
    with control.alike(problem):
        raise_problems([one[0] for one in said], problem)
        check_same(what, [one[1] for one in said])
    return [one[2] for one in said]


def check_same(what: str, values: Sequence[Any]) -> None:
    """Compare the values of all ranks.

    Raises:
        InputError: they are different.
    """
    ranks_of: dict[str, list[int]] = {}  # as written: NaN is like itself
    for rank, value in enumerate(values):
        ranks_of.setdefault(repr(value), []).append(rank)
    if len(ranks_of) > 1:
        shown = ", ".join(
            f"{values[ranks[0]]} on rank{'s' if ranks[1:] else ''} {' '.join(map(str, ranks))}"
            for ranks in ranks_of.values()
        )
        raise InputError(f"{what} must be the same on all ranks, but got {shown}")


def bits_of(value: float) -> int:
    """A number as a whole number that ranks can exchange."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
