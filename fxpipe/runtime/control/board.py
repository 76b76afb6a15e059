"""Tell all ranks what went wrong, beside the data path: through the store of the process groups.

There is one key per failure that the ranks have got over together. The first who writes it wins,
so all ranks speak of the same failure. A rank that cannot get over it says so under the next
key. Once a failure is final every rank also writes down what it was doing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fxpipe.runtime.control.store import Store, StoreSilentError
from fxpipe.runtime.control.watch import GRACE, POLL
from fxpipe.runtime.wire.failure import Deadline, Failure, remote_error

__all__ = ["HOLDER", "Board", "idle"]

HOLDER = "(the process that holds it, usually rank 0, may be stopped or gone)"


def idle() -> str:
    return "not inside a call"


class Board:
    """The failures that the ranks of one meeting know of."""

    def __init__(self, store: Store, prefix: str, rank: int, size: int) -> None:
        self.store = store
        self.rank, self.size = rank, size
        self.status: Callable[[], str] = idle
        self.failure: Failure | None = None
        self._prefix = prefix
        self._number = 0
        self._lock = threading.Lock()  # around the two: the watching thread learns of failures, too

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def enter(self, token: str) -> None:
        """All ranks have met: what they say from now on stands under this token."""
        self._prefix = f"{self._prefix}/{token}"

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be said after the failure."""
        return self.failure is not None and self.failure.is_final

    def report(self, failure: Failure) -> Failure:
        """Publish a failure; the first one of a call wins and is returned."""
        text, number = json.dumps(asdict(failure)), self._number
        key = self.key(f"failure/{number}")

        def publish(store: Any, text: str = text) -> bytes:
            return bytes(store.compare_set(key, "", text))

        try:
            text = self.store.ask(publish).decode()
        except StoreSilentError:  # whoever has stopped it hears of the failure when it goes on
            self.store.post(publish)
        except Exception:
            text = json.dumps(asdict(failure))
        found = Failure(**json.loads(text))
        self._learn(found, number)
        return found

    def report_final(self, failure: Failure) -> None:
        """Publish a final failure, also after another one."""
        if not self.report(failure).is_final:
            with self._lock:
                self._number += 1
            self.report(failure)

    def settled(self) -> Failure | None:
        """All ranks got over the failure of this call; returns it."""
        with contextlib.suppress(StoreSilentError):
            self.look()
        with self._lock:
            known, self.failure = self.failure, None
            self._number += 1
        return known

    def look(self) -> None:
        """Look for a failure in the store."""
        if self.is_over:
            return
        number = self._number
        for key in (self.key(f"failure/{number}"), self.key(f"failure/{number + 1}")):
            if not self.store.check([key]):  # nobody writes the second before the first
                return
            self._learn(Failure(**json.loads(self.store.get(key))), number)

    def look_and_raise(self) -> None:
        """Raise a failure that is known; a store that is slow says nothing."""
        with contextlib.suppress(StoreSilentError):
            self.look()
        if self.failure is not None:
            raise remote_error(self.failure)

    def _learn(self, failure: Failure, number: int) -> None:
        """Take note of a failure, unless it was settled while the store was asked."""
        with self._lock:
            if number == self._number:
                self.failure = failure
        if self.is_over:
            with contextlib.suppress(Exception):
                self.store.set(self.key(f"status/{self.rank}"), self.status())

    def diagnose(self) -> str:
        """What every rank is doing, as far as they still answer."""
        patience = Deadline(GRACE)
        lines = []
        for rank in range(self.size):
            key, text = self.key(f"status/{rank}"), "no answer: not inside a call, or gone"
            if rank == self.rank:
                text = self.status()
            else:
                with contextlib.suppress(Exception):
                    while not self.store.check([key]) and patience.left() > 0:
                        time.sleep(POLL / 4)
                    if self.store.check([key]):
                        text = self.store.get(key).decode()
            lines.append(f"  rank {rank}: {text}")
        return "\n".join(lines)
