"""Know whether the other ranks are there, and look around while this one is busy.

A process on this host is watched through the kernel, which knows when it ends, whoever holds its
sockets open: a forked child may. Processes on other hosts leave a sign of life in the store.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fxpipe.runtime.wire.failure import Failure

__all__ = ["GRACE", "POLL", "SILENCE", "Life", "Watch", "Watched"]

POLL = 0.1  # seconds between two looks at the store; more where many ranks share it
SILENCE = 30.0  # seconds without a sign of life after which a rank on another host is gone
GRACE = 1.0  # seconds in which a rank reads what one that has ended may still have sent


class Watched(Protocol):
    """What the thread looks after."""

    failure: Failure | None

    @property
    def poll(self) -> float: ...

    @property
    def needs_signs(self) -> bool: ...

    def watch(self, is_active: bool) -> None: ...

    def close(self) -> None: ...


class Life:
    """Whether the other ranks' processes are there."""

    def __init__(self, near: Mapping[int, int], far: Sequence[int]) -> None:
        self._pids = near
        self._handles: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._far = dict.fromkeys(far, (b"", 0.0))
        self._looked = 0.0
        self._beats = 0
        for rank, pid in near.items():
            with contextlib.suppress(OSError, AttributeError):
                self._handles[rank] = os.pidfd_open(pid)
        self._closed = weakref.finalize(self, _close_handles, list(self._handles.values()))
        self._closed.atexit = False

    def ended(self) -> list[tuple[int, str]]:
        """Ranks of this host whose process has ended."""
        poll = select.poll()
        by_handle = {}
        for rank, handle in self._handles.items():
            poll.register(handle, select.POLLIN)
            by_handle[handle] = rank
        found = sorted(by_handle[handle] for handle, _ in poll.poll(0)) if by_handle else []
        return [(rank, f"its process {self._pids[rank]} has ended") for rank in found]

    def sign(self, store: Any, key: str) -> None:
        """Leave a sign of our own life for the ranks of other hosts."""
        if self._far:
            self._beats += 1
            store.set(key, str(self._beats))

    def gone(self, store: Any, key: str) -> tuple[int, str] | None:
        """A rank that has been gone for a while, and how we know."""
        now = time.monotonic()
        for rank, why in self.ended():
            if now - self._ended.setdefault(rank, now) > GRACE:
                return rank, why
        stopped = now - self._looked > 5.0  # we did not look ourselves: count anew
        self._looked = now
        for rank, (said, since) in self._far.items():
            one = f"{key}/{rank}"
            found = store.get(one) if store.check([one]) else b""
            if found != said or stopped:
                self._far[rank] = (found, now)
            elif now - since > SILENCE:
                return rank, f"it has given no sign of life for {SILENCE:g} s"
        return None

    @property
    def needs_signs(self) -> bool:
        return bool(self._far)


def _close_handles(handles: Sequence[int]) -> None:
    for handle in handles:
        with contextlib.suppress(OSError):
            os.close(handle)


class Watch:
    """The thread that looks around while a call is made."""

    def __init__(self, control: Watched) -> None:
        self._state = _WatchState()
        self._thread: threading.Thread | None = None
        self._control = weakref.ref(control)
        # At exit the thread must be over: it would use the store while that is torn down.
        weakref.finalize(control, _stop, self._state)

    def start(self, status: Callable[[], str]) -> None:
        self._state.status = status
        self._state.is_active = True
        if self._thread is None:
            self._thread = self._state.thread = threading.Thread(
                target=_look_again_and_again,
                args=(self._control, self._state),
                name="fxpipe-watch",
                daemon=True,
            )
            self._thread.start()
        self._state.wake.set()

    def stop(self) -> None:
        self._state.is_active = False
        self._state.status = _idle

    def status(self) -> str:
        return self._state.status()


def _idle() -> str:
    return "not inside a call"


class _WatchState:
    def __init__(self) -> None:
        self.wake = threading.Event()
        self.over = threading.Event()
        self.is_active = False
        self.status: Callable[[], str] = _idle
        self.thread: threading.Thread | None = None


def _stop(state: _WatchState) -> None:
    state.over.set()
    state.wake.set()
    if state.thread is not None and state.thread is not threading.current_thread():
        state.thread.join(1.0)


def _look_again_and_again(control: weakref.ref[Watched], state: _WatchState) -> None:
    since = 0.0
    while not state.over.is_set() and not sys.is_finalizing():
        alive = control()
        if alive is None:
            return
        pause, signs = alive.poll, alive.needs_signs
        if state.is_active or signs:
            try:
                alive.watch(state.is_active)
            except Exception:  # the store is gone: nothing to learn any more
                signs = False
                state.is_active = False
        if state.is_active and alive.failure is not None and alive.failure.is_final:
            since = since or time.monotonic()
            if time.monotonic() - since > GRACE:
                alive.close()  # whoever is blocked in a transfer has to be woken
        del alive
        if state.is_active or signs:
            state.over.wait(pause if state.is_active else 1.0)
        else:
            state.wake.clear()
            if not state.is_active:
                state.wake.wait()
