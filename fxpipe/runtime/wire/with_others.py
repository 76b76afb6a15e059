"""Do what waits in C for other ranks: they may never come, and nothing would wake us there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.transport import TransportError

__all__ = ["with_others"]

_SLICE = 0.05  # seconds between two looks

T = TypeVar("T")


def with_others(
    work: Callable[[], T], device: torch.device, deadline: Deadline, gave_up: Callable[[], bool]
) -> T:
    """What `work` returns, done by a thread of its own, which is left alone once it is too late.

    Raises:
        TransportError: the deadline is over, or the call was given up meanwhile.
    """
    made: list[T] = []
    errors: list[BaseException] = []
    is_over = threading.Event()
    place = None if device.type == "cpu" else torch.accelerator.current_device_index()

    def run() -> None:
        try:
            if place is not None:  # every thread has a current device of its own
                torch.accelerator.set_device_index(place)
            made.append(work())
        except BaseException as error:
            errors.append(error)
        is_over.set()

    threading.Thread(target=run, name="fxpipe-connect", daemon=True).start()
    while not is_over.wait(_SLICE):
        if gave_up():
            raise TransportError(-1, "the call was given up", timed_out=False)
        if deadline.left() == 0.0:
            raise TransportError(-1, f"timed out after {deadline.seconds:g} s", timed_out=True)
    if errors:
        raise errors[0]
    return made[0]
