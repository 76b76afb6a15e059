"""Where a user asks for a split, and which modules have to be opened for it.

`pipe_split()` does nothing in ordinary runs. While a model is captured it tells
the capture that is active in this thread. Names in a `split_spec` are checked
here against the model before anything runs; nothing is attached to the model.

A module is opened only if a cut has to fall inside it; every other module stays
one call. Opening comes before the trace, and a policy cuts what was traced.
"""

from __future__ import annotations

import difflib
import enum
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from fxpipe.errors import SplitError, UnknownModuleError

__all__ = [
    "SplitPoint",
    "ancestors",
    "annotate_split_points",
    "check_split_spec",
    "choose_opened",
    "listening",
    "pipe_split",
]


class SplitPoint(enum.Enum):
    """On which side of a module's call a new stage begins."""

    BEGINNING = 1
    END = 2


_listener = threading.local()
_annotated: WeakKeyDictionary[nn.Module, dict[str, SplitPoint]] = WeakKeyDictionary()


def pipe_split() -> None:
    """Begin a new stage here. Outside of `pipeline()` this does nothing."""
    listener: Callable[[], None] | None = getattr(_listener, "call", None)
    if listener is not None:
        listener()


@contextmanager
def listening(call: Callable[[], None]) -> Iterator[None]:
    """Have each `pipe_split()` of this thread run `call`."""
    before = getattr(_listener, "call", None)
    _listener.call = call
    try:
        yield
    finally:
        _listener.call = before


def annotate_split_points(module: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Remember a split spec for a module; `pipeline()` uses it if it is given no other."""
    check_split_spec(module, spec)
    _annotated.setdefault(module, {}).update(spec)


def annotations_of(module: nn.Module) -> dict[str, SplitPoint]:
    """Return what `annotate_split_points` remembered for a module."""
    return dict(_annotated.get(module, {}))


def check_split_spec(module: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Check that every name is a submodule and every value a split point.

    Raises:
        SplitError: lists each unknown name with the closest known ones.
    """
    known = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    faults = []
    for name, point in spec.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; closest: {', '.join(map(repr, close))}" if close else ""
            faults.append(f"{name!r} is not a submodule of {type(module).__name__}{hint}")
        elif not isinstance(point, SplitPoint):
            faults.append(f"{name!r} needs SplitPoint.BEGINNING or SplitPoint.END, got {point!r}")
    if faults:
        unknown = any(name not in known for name in spec)
        kind = UnknownModuleError if unknown else SplitError
        raise kind("split_spec does not fit the model:\n  " + "\n  ".join(faults))


def ancestors(names: Iterable[str]) -> set[str]:
    """Return the names of all modules around the given ones, the model ("") included."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return found


def choose_opened(module: nn.Module, num_stages: int, whole: Collection[str] = ()) -> set[str]:
    """Return the modules to open so that `num_stages` equal stages become possible.

    The heaviest module is opened as long as it holds more than half a stage's
    share of the parameters and has parts to spread. Those named in `whole` stay closed.
    """
    opened = {""}
    parts = {name: _weight(child) for name, child in module.named_children()}
    total = sum(parts.values()) or 1
    while parts:
        name, weight = max(parts.items(), key=lambda item: item[1])
        children = dict(module.get_submodule(name).named_children())
        if weight * num_stages <= total and len(parts) >= num_stages:
            break
        if weight * 2 * num_stages <= total:
            break
        del parts[name]
        if children and weight and name not in whole:
            opened.add(name)
            parts.update({f"{name}.{key}": _weight(child) for key, child in children.items()})
        elif not any(_weight(module.get_submodule(other)) for other in parts):
            break
    return opened


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
