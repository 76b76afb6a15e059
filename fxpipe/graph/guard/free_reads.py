"""Tell from the code of functions what they can read beside attributes.

Globals, what a function closes over, context variables: a name counts as read if the code
mentions it, also in a branch that is not taken. Noted are numbers, texts and the like, containers
of them, and the user's functions, whose own code is looked at in turn.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fxpipe.graph.guard.changeable import CONTAINERS, copied
from fxpipe.graph.guard.world import Asked
from fxpipe.graph.nested import is_atom
from fxpipe.graph.source_line import Place, is_users

__all__ = ["FreeReads"]

_MOST_CODE = 1000  # functions, and their code, that are looked at
_LARGEST = 200  # entries of a container
_NOTHING = object()
# Methods by which code changes a container: a log or a register, and no setting.
_CHANGES = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear"}
)
_LRU_CACHE = type(functools.lru_cache(lambda: None))


class FreeReads:
    """What the functions that ran can read."""

    def __init__(self, on_object: Callable[[object, str], None]) -> None:
        self.asked: dict[object, Asked] = {}
        self._on_object = on_object
        self._seen: dict[int, object] = {}  # by identity: equal code may have other globals

    def note(self, value: object) -> None:
        """Look at the functions behind a callable, a property or a method."""
        for function in _functions(value):
            if id(function) in self._seen:
                continue
            self._seen[id(function)] = function
            code = function.__code__
            place = Place(code.co_filename, code.co_firstlineno)
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
            for name, cell in cells.items():
                ask = functools.partial(getattr, cell, "cell_contents")
                self._value(name, ask, id(cell), place)
            for mention in _mentions(code):
                if mention.name in cells and mention.attribute not in _CHANGES:
                    cell = cells[mention.name]
                    ask = functools.partial(getattr, cell, "cell_contents", None)
                    self._container(mention.name, ask, id(cell), mention.place)
            self.note_code(code, function.__globals__)

    def note_code(self, code: types.CodeType, names: dict[str, object]) -> None:
        """Look at code that runs with these globals."""
        is_known = id(code) in self._seen or len(self._seen) >= _MOST_CODE
        if is_known or not _is_models(code.co_filename):
            return
        self._seen[id(code)] = code
        for mention in _mentions(code):
            if mention.name in names:
                self._mention(names, mention)

    def _mention(self, names: dict[str, object], mention: _Mention) -> None:
        value, text = names[mention.name], mention.name
        key = (id(names), mention.name)
        if mention.attribute and _is_users_own(value):
            text = f"{mention.name}.{mention.attribute}"
            key = (id(value), mention.attribute)
            ask: Callable[[], object] = functools.partial(
                getattr, value, mention.attribute, _NOTHING
            )
        else:
            ask = functools.partial(names.get, mention.name, _NOTHING)
        if mention.attribute not in _CHANGES:
            self.note_read(text, ask, key, mention.place)
        else:
            self._value(text, ask, key, mention.place)

    def note_read(self, text: str, ask: Callable[[], object], key: object, place: Place) -> None:
        """Take note of a value, and of what is in it."""
        self._value(text, ask, key, place)
        self._container(text, ask, key, place)

    def _value(self, text: str, ask: Callable[[], object], key: object, place: Place) -> None:
        try:
            value = ask()
        except ValueError:  # a cell that is not yet filled
            return
        if isinstance(value, contextvars.ContextVar):
            text, ask = f"{text}.get()", functools.partial(_context, value)
            value = ask()
        if isinstance(value, (types.FunctionType, _LRU_CACHE)):
            self.note(value)
        elif is_atom(value) and not isinstance(value, type):
            self.asked.setdefault(key, Asked(text, ask, value, place))
        else:
            self._on_object(value, text)

    def _container(self, text: str, ask: Callable[[], Any], key: object, place: Place) -> None:
        value = ask()
        if not isinstance(value, CONTAINERS) or not 0 < len(value) <= _LARGEST:
            return
        if all(map(is_atom, value.values() if isinstance(value, dict) else value)):
            self.asked.setdefault(key, Asked(text, lambda: copied(ask()), copied(value), place))


def _context(variable: contextvars.ContextVar[object]) -> object:
    try:
        return variable.get()
    except LookupError:
        return None


class _Mention(NamedTuple):
    """A global name in some code, and the attribute that is taken from it, if one is."""

    name: str
    attribute: str
    place: Place


@functools.lru_cache(maxsize=4096)
def _mentions(code: types.CodeType) -> tuple[_Mention, ...]:
    found = {(m.name, m.attribute): m for m in _all_mentions(code)}
    return tuple(found.values())


def _all_mentions(code: types.CodeType) -> Iterator[_Mention]:
    name, line = "", code.co_firstlineno
    for step in dis.get_instructions(code):
        if name:
            is_part = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield _Mention(name, step.argval if is_part else "", Place(code.co_filename, line))
        line = (step.positions and step.positions.lineno) or line
        name = step.argval if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_mentions(constant)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield the user's functions behind a callable, the wrapped ones too."""
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        value = value.func
    while isinstance(value, (types.FunctionType, _LRU_CACHE)):
        if isinstance(value, types.FunctionType) and _is_models(value.__code__.co_filename):
            yield value
        value = getattr(value, "__wrapped__", None)


_STANDARD = dis.__file__.rpartition("/")[0] + "/"


def _is_models(file: str) -> bool:
    """Say whether a file may be the model's: not ours, torch's or of the standard library."""
    return is_users(file) and (not file.startswith(_STANDARD) or "site-packages" in file)


def _is_users_own(value: object) -> bool:
    """Say whether a global is a class or a file of the user's, of which code takes a part."""
    if isinstance(value, types.ModuleType):
        return _is_models(getattr(value, "__file__", None) or "<")
    return isinstance(value, type) and not value.__module__.startswith(("torch.", "builtins"))
