"""Tell schedules apart that have not run yet, by the order in which they were made."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from fxpipe.runtime.wire.local_group import resolve_group

__all__ = ["Newcomer"]

_NEW: list[weakref.ref[Newcomer]] = []


class Newcomer:
    """A schedule that has not run yet. Ranks tell such schedules apart by their order."""

    def __init__(self, group: Any) -> None:
        self._group = group
        _NEW.append(weakref.ref(self))

    def place(self) -> int:
        """Which of the new schedules of its group this is, from 1 on."""
        if len(_NEW) > 1:
            gc.collect()  # what nobody can use any more must not count on some ranks only
            _NEW[:] = [ref for ref in _NEW if ref() is not None]
        group, found = resolve_group(self._group), [ref() for ref in _NEW]
        mine = [one for one in found if one and resolve_group(one._group) is group]
        return mine.index(self) + 1

    def leave(self) -> None:
        _NEW[:] = [ref for ref in _NEW if ref() not in (None, self)]
