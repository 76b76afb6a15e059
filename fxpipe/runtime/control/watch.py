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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fxpipe.runtime.control.store import Store

if TYPE_CHECKING:
    from fxpipe.runtime.control.group_control import GroupControl

__all__ = ["GRACE", "POLL", "SIGN", "SILENCE", "Life", "Watch"]

POLL = 0.1  # seconds between two looks at the store; more where many ranks share it
SIGN = 3.0  # seconds between two signs of life
SILENCE = 30.0  # seconds without a sign of life after which a rank on another host is gone
GRACE = 1.0  # seconds in which a rank reads what one that has ended may still have sent


class Life:
    """Whether the other ranks' processes are there."""

    def __init__(self, near: Mapping[int, int], far: Sequence[int]) -> None:
        self._pids = near
        self._handles: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._far = dict.fromkeys(far, (b"", 0.0))
        self._looked = self._signed = -SILENCE
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

    def sign(self, store: Store, key: str) -> None:
        """Leave a sign of our own life for the ranks of other hosts."""
        now = time.monotonic()
        if self._far and now - self._signed >= SIGN:
            self._signed = now
            self._beats += 1
            store.set(key, str(self._beats))

    def gone(self, store: Store, key: str) -> tuple[int, str] | None:
        """A rank that has been gone for a while, and how we know."""
        now = time.monotonic()
        for rank, why in self.ended():
            if now - self._ended.setdefault(rank, now) > GRACE:
                return rank, why
        since_look = now - self._looked
        if not self._far or since_look < SIGN:
            return None
        self._looked = now
        found = _values(store, [f"{key}/{rank}" for rank in self._far])
        for (rank, (said, since)), sign in zip(self._far.items(), found, strict=True):
            if sign != said or since_look > 3 * SIGN:  # we did not look ourselves: count anew
                self._far[rank] = (sign, now)
            elif now - since > SILENCE:
                return rank, f"it has given no sign of life for {SILENCE:g} s"
        return None

    @property
    def needs_signs(self) -> bool:
        return bool(self._far)


def _values(store: Store, keys: Sequence[str]) -> list[bytes]:
    """What the store has for the keys, in one request once all are there."""
    if store.check(keys):
        return [bytes(found) for found in store.ask(lambda real: real.multi_get(keys))]
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def _close_handles(handles: Sequence[int]) -> None:
    for handle in handles:
        with contextlib.suppress(OSError):
            os.close(handle)


class Watch:
    """The thread that looks around while a call is made; it ends with the control."""

    def __init__(self, control: GroupControl) -> None:
        self._control = weakref.ref(control)
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._over = threading.Event()
        self._is_active = False
        # At exit the thread must be over: it would use the store while that is torn down.
        weakref.finalize(control, self._end)

    def start(self) -> None:
        self._is_active = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fxpipe-watch", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        self._is_active = False

    def end(self) -> None:
        """There is nothing left to look after."""
        self._over.set()
        self._wake.set()

    def _end(self) -> None:
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        since = 0.0
        while not self._over.is_set() and not sys.is_finalizing():
            control = self._control()
            if control is None:
                return
            pause, signs = control.poll, control.life.needs_signs
            if self._is_active or signs:
                try:
                    control.watch(self._is_active)
                except Exception:  # the store is gone: nothing to learn any more
                    self._is_active = signs = False
            if self._is_active and control.board.is_over:
                since = since or time.monotonic()
                if time.monotonic() - since > GRACE:
                    control.close()  # whoever is blocked in a transfer has to be woken
            del control
            if self._is_active or signs:
                self._over.wait(pause if self._is_active else 1.0)
            else:
                self._wake.clear()
                if not self._is_active:
                    self._wake.wait()
