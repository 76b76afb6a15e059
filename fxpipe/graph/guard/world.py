"""Compare what opened code read while it was traced with what is there now.

In:  the `Reads` of a trace, after the model was put back as it was.
Out: a `World`, whose `changes` lists every attribute, container and setting that
     differs from what the graph was written for.

Made for being asked before each run: what was read of one module is one tuple, compared
in one go. Modules and tensors are held weakly, so that a stage keeps alive no part of
the model that it does not run.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fxpipe.errors import TraceError
from fxpipe.graph.guard.changeable import CONTAINERS, copied, unseen
from fxpipe.graph.nested import contents, is_atom
from fxpipe.graph.source_line import Place
from fxpipe.torch_inside import BUFFERS, HOOKS, MODULES, PARAMETERS

if TYPE_CHECKING:
    from fxpipe.graph.guard.reads import Reads

__all__ = ["MISSING", "PLACES", "Asked", "Read", "World", "find", "own_attributes"]

_MOST = 5000  # entries of one container that are compared


class _Missing:
    """Stands for an attribute that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
PLACES = (PARAMETERS, BUFFERS, MODULES)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """The first read of an attribute: where it was found, its value, and what was inside."""

    holder: object
    name: str
    home: str  # one of PLACES, "__dict__", "class" or "" for an attribute that is missing
    value: object
    inside: Any
    place: Place


class Asked(NamedTuple):
    """Something outside the model: what it was, how to ask for it again, and who reads it."""

    text: str
    ask: Callable[[], object]
    value: object
    place: Place

    def now(self) -> object:
        """Return what it is now; an object of ours where it is gone."""
        try:
            return self.ask()
        except Exception:
            return MISSING

    def is_same(self) -> bool:
        now = self.now()
        try:
            return type(now) is type(self.value) and bool(now == self.value)
        except Exception:
            return False


def find(holder: object, name: str) -> tuple[str, Any]:
    """Return where an attribute is and its value, without running any code of the class."""
    attributes = own_attributes(holder)
    if name in attributes:
        return "__dict__", attributes[name]
    if isinstance(holder, nn.Module):
        for place in PLACES:
            inside = attributes.get(place)
            if inside is not None and name in inside:
                return place, inside[name]
    for kind in type(holder).__mro__:
        if name in kind.__dict__:
            return "class", kind.__dict__[name]
    return "", MISSING


def own_attributes(holder: object) -> dict[str, Any]:
    """Return an object's own attributes."""
    try:
        found: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Attributes:
    """Numbers, texts and the like that one object has under some names."""

    holder: Callable[[], object]
    home: str
    names: tuple[str, ...]
    get: Callable[[Any], object]
    values: tuple[object, ...]

    def is_same(self) -> bool:
        holder = self.holder()
        if holder is None:
            return True
        try:
            place = vars(holder)
            return bool(self.get(place[self.home] if self.home else place) == self.values)
        except Exception:
            return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Identity:
    """A module, tensor, function or object under a name; or nothing."""

    holder: Callable[[], object]
    home: str
    name: str
    value: Callable[[], object]
    shape: object = None

    def is_same(self) -> bool:
        holder = self.holder()
        if holder is None:
            return True
        value = self.value()
        if value is None:
            return True
        if self.home in ("class", ""):
            now = find(holder, self.name)[1]
        else:
            place = holder.__dict__
            now = (place if self.home == "__dict__" else place[self.home]).get(self.name, MISSING)
        if now is value:
            return True
        # Parameters and buffers that are replaced by others are followed.
        return self.shape is not None and getattr(now, "shape", None) == self.shape


@dataclasses.dataclass(frozen=True, slots=True)
class _Contents:
    """What is in a list, dict or set: as a copy, by identity, or by its keys alone."""

    live: Any
    copy: Any

    def is_same(self) -> bool:
        try:
            if not isinstance(self.live, CONTAINERS):
                return bool(unseen(self.live) == self.copy)
            if isinstance(self.copy, tuple):
                return tuple(self.live) == self.copy
            if isinstance(self.copy, _Ids):
                return _ids(self.live) == self.copy
            return bool(self.live == self.copy)
        except Exception:
            return False


_Entry = _Attributes | _Identity | _Contents | Asked


class World:
    """Everything outside of a graph that it relies on."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._told: dict[int, Callable[[], list[str]]] = {}

    @classmethod
    def of(
        cls, reads: Reads, opened: dict[str, nn.Module], real_of: Mapping[int, torch.Tensor]
    ) -> World:
        """Return what was read and is of the world, not made by the forward itself."""
        world = cls()
        grouped: dict[tuple[int, str], list[Read]] = {}
        for read in reads.noted.values():
            home, now = find(read.holder, read.name)
            if home != read.home:
                continue
            owner = reads.names.get(id(read.holder), "")
            text = f"{owner}.{read.name}" if owner else read.name
            if isinstance(read.value, torch.Tensor):
                if real_of.get(id(read.value), read.value) is now:
                    shape = now.shape if home in (PARAMETERS, BUFFERS) else None
                    world._identity(read, now, text, shape)
            elif is_atom(now) and home not in ("class", ""):
                if now is read.value or now == read.value:
                    grouped.setdefault((id(read.holder), home), []).append(read)
            elif read.value is now:
                world._identity(read, now, text, None)
                if unseen(now) is not None:
                    world._told_as(now, read.inside, text, read.place)
                elif read.inside is None or contents(now) == read.inside:
                    world._contents(now, text, read.place)
                elif type(now) is dict:  # the run itself had put more in before it was read
                    world._some_contents(now, read.inside, text, read.place)
        for (_, home), found in grouped.items():
            world._attributes(home, found, reads.names.get(id(found[0].holder), ""))
        for name, part in opened.items():
            world._forward(part, name)
            for kind in HOOKS if not isinstance(part, torch.jit.ScriptModule) else ():
                world._hooks(vars(part)[kind], name, kind)
        for asked in reads.asked.values():
            world._asked(asked)
        return world

    def _forward(self, part: nn.Module, name: str) -> None:
        home, now = find(part, "forward")
        if home == "class" and hasattr(now, "__code__"):
            place = Place(now.__code__.co_filename, now.__code__.co_firstlineno)
            read = Read(part, "forward", home, now, None, place)
            self._identity(read, now, f"{name}.forward".strip("."), None)

    def joined(self, other: World) -> World:
        """Return what either of two graphs relies on."""
        made = World()
        made._entries = [*self._entries, *other._entries]
        made._told = {**self._told, **other._told}
        return made

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Compare.

        Raises:
            TraceError: lists everything that is not as it was in the trace.
        """
        for entry in self._entries:
            if not entry.is_same():
                raise TraceError(
                    "the model is not what it was when pipeline() traced it:\n  "
                    + "\n  ".join(dict.fromkeys(self._changes()))
                    + "\ncode that is split has read this, and a stage would go on as it was "
                    "traced; change it back or call pipeline() again"
                )

    def _changes(self) -> Iterator[str]:
        for entry in self._entries:
            if not entry.is_same():
                yield from self._told[id(entry)]()

    def _add(self, entry: _Entry, told: Callable[[], list[str]]) -> None:
        self._entries.append(entry)
        self._told[id(entry)] = told

    def _attributes(self, home: str, found: list[Read], owner: str) -> None:
        names = tuple(read.name for read in found)
        places = {read.name: read.place for read in found}
        values = tuple(find(read.holder, read.name)[1] for read in found)
        if len(names) == 1:
            names, values = names * 2, values * 2
        entry = _Attributes(
            _held(found[0].holder), "" if home == "__dict__" else home, names, itemgetter(*names),
            values,
        )  # fmt: skip

        def told() -> list[str]:
            now = {name: find(entry.holder(), name)[1] for name in names}
            return [
                f"{owner + '.' if owner else ''}{name} was {old!r}, is {_text(now[name])}"
                f"{_at(places[name])}"
                for name, old in zip(names, values, strict=True)
                if not (now[name] is old or (is_atom(now[name]) and now[name] == old))
            ]

        self._add(entry, told)

    def _identity(self, read: Read, now: object, text: str, shape: object) -> None:
        value = (lambda: now) if now is MISSING or is_atom(now) else _held(now)
        entry = _Identity(_held(read.holder), read.home, read.name, value, shape)
        was, place = _text(now), read.place

        def told() -> list[str]:
            is_now = _text(find(entry.holder(), entry.name)[1])
            changed = is_now if is_now != was else f"another {is_now}"
            return [f"{text} was {was}, is {changed}{_at(place)}"]

        self._add(entry, told)

    def _contents(self, value: Any, text: str, place: Place, depth: int = 0) -> None:
        if not isinstance(value, CONTAINERS) or len(value) > _MOST or depth > 6:
            return
        inside = list(value.values()) if isinstance(value, dict) else list(value)
        holds = any(isinstance(part, (nn.Module, torch.Tensor)) for part in inside)
        self._told_as(value, _ids(value) if holds else copied(value), text, place)
        for part in inside:
            self._contents(part, text, place, depth + 1)

    def _told_as(self, value: Any, inside: Any, text: str, place: Place) -> None:
        entry = _Contents(value, inside)
        self._add(entry, lambda: [f"the contents of {text} have changed{_at(place)}"])

    def _some_contents(
        self, live: dict[object, object], inside: Any, text: str, place: Place
    ) -> None:
        """Compare the entries of a dict that code found as they were before the run."""
        for key, part in zip(*inside, strict=False):
            if key in live and id(live[key]) == part and is_atom(live[key]):
                asked = functools.partial(live.get, key)
                self._asked(Asked(f"{text}[{key!r}]", asked, live[key], place))

    def _hooks(self, live: Any, name: str, kind: str) -> None:
        entry = _Contents(live, tuple(live))
        self._add(
            entry,
            lambda: [
                f"{kind.strip('_').replace('_', ' ')} of {name or 'the model'} were "
                f"{len(entry.copy)}, are {len(live)}: a module that is split has the "
                "hooks that it had in the trace"
            ],
        )

    def _asked(self, asked: Asked) -> None:
        self._add(
            asked,
            lambda: [
                f"{asked.text} was {_text(asked.value)}, is {_text(asked.ask())}{_at(asked.place)}"
            ],
        )


def _held(value: object) -> Callable[[], object]:
    """Return a way to a value; modules and tensors are held weakly."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return weakref.ref(value)
    return lambda: value


class _Ids(list[object]):
    """The keys of a container and the identities of what is in it."""


def _ids(value: Iterable[object]) -> _Ids:
    if isinstance(value, dict):
        return _Ids([*value, *map(id, value.values())])
    return _Ids(map(id, value))


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


def _at(place: Place) -> str:
    return f"\n    read at {place}: {place.source}"
