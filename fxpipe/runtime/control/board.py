"""Tell all ranks what went wrong, beside the data path: through the store of the process groups.

There is one key per failure that the ranks have got over together. The first who writes it wins,
so all ranks speak of the same failure. A rank that cannot get over it says so under the next
key. Once a failure is final every rank also writes down what it was doing.

Before all have met, no key is this meeting's alone: an earlier process group may have failed to
meet under the same one. A failure that was there when this rank came may be of that group, or this
rank may be late: the store looks the same. It counts at once if who says it has heard this rank,
and else if that one does not come to meet anew for a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fxpipe.runtime.control.store import Store, StoreSilentError
from fxpipe.runtime.control.watch import GRACE, POLL
from fxpipe.runtime.wire.failure import Deadline, Failure, remote_error

__all__ = ["DOUBT", "HOLDER", "Board", "idle"]

DOUBT = 10.0  # seconds in which who has failed to meet before may come to meet anew

_TOLD: set[str] = set()  # tokens of who said a failure that this process has raised

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
        self.word: dict[str, Any] = {"token": os.urandom(8).hex(), "heard": {}}
        self.doubt = DOUBT
        self._has_met, self._doubts_since = False, 0.0
        self._left: Mapping[str, Any] | None = None  # the failure that was there
        self._prefix = prefix
        self._number = 0
        self._lock = threading.Lock()  # around the two: the watching thread learns of failures, too

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def come(self) -> None:
        """Before this rank's first word: note the failure that is there already."""
        key = self.key("failure/0")
        if self.store.check([key]):
            self._left = json.loads(self.store.get(key))

    def greet(self) -> None:
        """Leave this rank's word for the others, before all have met."""
        self.store.set(self.key(f"hello/{self.rank}"), json.dumps(self.word))

    def enter(self, token: str) -> None:
        """All ranks have met: what they say from now on stands under this token."""
        self._prefix, self._has_met = f"{self._prefix}/{token}", True

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be said after the failure."""
        return self.failure is not None and self.failure.is_final

    def report(self, failure: Failure) -> Failure:
        """Publish a failure; the first one of a call wins and is returned."""
        number = self._number
        said: dict[str, Any] = {"failure": asdict(failure), "by": self.rank, **self.word}
        text, word = json.dumps(said), json.dumps(self.word)
        key, hello = self.key(f"failure/{number}"), self.key("hello")

        def publish(store: Any) -> bytes:
            store.set(f"{hello}/{self.rank}", word)
            found = bytes(store.compare_set(key, "", text))
            while self._is_old(store, hello, json.loads(found)):
                found = bytes(store.compare_set(key, found.decode(), text))
            return found

        try:
            said = json.loads(self.store.ask(publish))
        except StoreSilentError:  # whoever has stopped it hears of the failure when it goes on
            self.store.post(publish)
        except Exception:  # the store is gone
            pass
        return self._learn(said, number)

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
            said = json.loads(self.store.get(key))
            if not self._counts(said):
                return
            self._learn(said, number)

    def _counts(self, said: Mapping[str, Any]) -> bool:
        """Whether a failure is one of this meeting."""
        if said != self._left or self._is_known(said):
            return True
        hello = self.key("hello")
        if self.store.ask(lambda store: self._is_old(store, hello, said)):
            return False
        now = time.monotonic()
        self._doubts_since = self._doubts_since or now
        return now - self._doubts_since >= self.doubt

    def _is_known(self, said: Mapping[str, Any]) -> bool:
        """Whether who has said a failure has heard this rank, or is this rank."""
        if self._has_met:  # all have
            return True
        token = self.word["token"]
        return token in (said["token"], said["heard"].get(str(self.rank)))

    def _is_old(self, store: Any, hello: str, said: Mapping[str, Any]) -> bool:
        """Whether a failure is surely one of an earlier process group."""
        if self._is_known(said):
            return False
        if said["token"] in _TOLD:  # a process meets only once under this key, for each group
            return True
        word = json.loads(bytes(store.get(f"{hello}/{said['by']}")))
        return bool(word["token"] != said["token"])

    def look_and_raise(self) -> None:
        """Raise a failure that is known; a store that is slow says nothing."""
        with contextlib.suppress(StoreSilentError):
            self.look()
        if self.failure is not None:
            raise remote_error(self.failure)

    def _learn(self, said: Mapping[str, Any], number: int) -> Failure:
        """Take note of a failure, unless it was settled while the store was asked."""
        failure = Failure(**said["failure"])
        _TOLD.add(said["token"])
        with self._lock:
            if number == self._number:
                self.failure = failure
        if self.is_over:
            with contextlib.suppress(Exception):
                self.store.set(self.key(f"status/{self.rank}"), self.status())
        return failure

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
