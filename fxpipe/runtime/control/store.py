"""Ask the store of the process groups, and wait no longer than one may.

The store lives in one of the processes. If that one is stopped, those who ask it wait in C, where
nothing wakes them. So a thread asks, one question after the other, and who needs the answer waits
for the thread. Once an answer is late, questions fail at once until it has come.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["PATIENCE", "Store", "StoreSilentError"]

_SLICE = 0.1  # seconds between two looks

PATIENCE = 1.0
"""Seconds to wait for an answer that only adds to what is known."""


class StoreSilentError(RuntimeError):
    """The store did not answer in time."""


class _Question:
    __slots__ = ("answer", "error", "is_over", "work")

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.answer: Any = None
        self.error: BaseException | None = None
        self.is_over = threading.Event()


_Questions = queue.SimpleQueue[_Question | None]


class Store:
    """A store that `connect` makes, when it is first asked."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._questions: _Questions = queue.SimpleQueue()
        self._late: _Question | None = None
        self.patience = PATIENCE
        thread = threading.Thread(
            target=_answer, args=(connect, self._questions), name="fxpipe-store", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._questions, thread)

    @property
    def is_silent(self) -> bool:
        return self._late is not None and not self._late.is_over.is_set()

    def post(self, work: Callable[[Any], Any]) -> None:
        """Let `work` be done when the store answers again; nobody waits for it."""
        self._questions.put(_Question(work))

    def ask(
        self,
        work: Callable[[Any], Any],
        seconds: float | None = None,
        look: Callable[[], None] | None = None,
    ) -> Any:
        """What `work` returns for the store itself. `look` is called meanwhile and may raise.

        Raises:
            StoreSilentError: it takes longer than so many seconds, or than `patience`.
        """
        question = _Question(work)
        if not self.is_silent:
            self._questions.put(question)
            end = time.monotonic() + (self.patience if seconds is None else seconds)
            while look is not None and not question.is_over.wait(_SLICE):
                look()
                if time.monotonic() > end:
                    break
            if not question.is_over.wait(max(0.0, end - time.monotonic())):
                self._late = question
        if self.is_silent:
            raise StoreSilentError("the store of the process groups does not answer")
        if question.error is not None:
            raise question.error
        return question.answer

    def set(self, key: str, value: str) -> None:
        self.ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self.ask(lambda store: store.get(key)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.ask(lambda store: store.check(keys)))


def _answer(connect: Callable[[], Any], questions: _Questions) -> None:
    store = None
    while (question := questions.get()) is not None:
        try:
            if store is None:
                store = connect()
            question.answer = question.work(store)
        except BaseException as error:
            question.error = error
        question.is_over.set()
        del question  # what it holds must not live until the next one


def _end(questions: _Questions, thread: threading.Thread) -> None:
    questions.put(None)
    if thread is not threading.current_thread():
        thread.join(0.2)
