"""Describe what is in a value that code may change without an attribute being set.

Two descriptions are equal if nothing has changed. What holds modules and tensors is described
elsewhere, by their identities.
"""

from __future__ import annotations

import collections
import itertools
import operator
import types
from collections.abc import Iterator
from typing import Any

from fxpipe.graph.nested import contents

__all__ = ["CONTAINERS", "copied", "unseen"]

CONTAINERS = (list, dict, set, collections.deque)


def copied(value: Any) -> Any:
    """Return what is in a container, as a list, dict, set or deque."""
    kind = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
    return value if kind is None else kind(value)


def unseen(value: Any) -> object:
    """Describe what is in a value of C code that code may change; None for any other.

    Those are namespaces, arrays of numbers, and iterators, by how far they are.
    """
    if isinstance(value, types.SimpleNamespace):
        return contents(value)
    if type(value).__module__ in ("builtins", "itertools") and isinstance(value, Iterator):
        step = getattr(getattr(value, "gi_frame", None), "f_lasti", None)
        is_open = step is None and type(value) not in _TELLING
        return object() if is_open else (step, repr(value), operator.length_hint(value, -1))
    try:
        view = memoryview(value)
        return view.tobytes() if view.nbytes <= _MOST_BYTES else None
    except Exception:
        return None


_MOST_BYTES = 1_000_000
# Iterators that tell how far they are; any other counts as changed.
_TELLING: tuple[type, ...] = (
    itertools.count,
    itertools.repeat,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)
