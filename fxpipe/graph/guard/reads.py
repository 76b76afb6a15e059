"""Note everything that opened code reads of the Python world while it is traced.

A graph holds what the code did for the attributes it read: `if self.flag` is gone. So
each first read is noted with its value, for modules and for the plain objects that
modules keep (a config, a helper). `World` compares these values before the graph is
used again; `carried` tells which of them the forward itself changed. These reads are seen by a
`__getattribute__` on the classes, for the time of the trace. The machinery of `nn.Module`
itself (its dicts, `training`) is not noted, nor an attribute of a module that the code
has set before it reads it.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from fxpipe.graph.guard.changeable import CONTAINERS, unseen
from fxpipe.graph.guard.free_reads import FreeReads
from fxpipe.graph.guard.world import MISSING, PLACES, Asked, Read, find, own_attributes
from fxpipe.graph.nested import contents, is_atom
from fxpipe.graph.sandbox.patches import patched
from fxpipe.graph.sandbox.restore import device_kinds
from fxpipe.graph.source_line import is_ours, is_users, user_frame

__all__ = ["Reads"]


_MACHINERY = frozenset({*vars(nn.Module()), *dir(nn.Module), "_is_hf_initialized", "forward"})
# Settings of the process that code may ask for, by the module that has the function.
_SETTINGS = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype",
    "are_deterministic_algorithms_enabled", "get_default_dtype", "is_autocast_cache_enabled",
)  # fmt: skip


class Reads:
    """The reads of one trace."""

    def __init__(
        self,
        module: nn.Module,
        is_opened: Callable[[], bool],
        on_read: Callable[[object, str], None] = lambda holder, name: None,
    ) -> None:
        self._on_read = on_read
        self.names = {id(part): name for name, part in module.named_modules()}
        self.noted: dict[tuple[int, str], Read] = {}
        self.caches: list[Read] = []
        self.written: set[tuple[int, str]] = set()  # attributes of modules
        self._free = FreeReads(self._watch_global)
        self.asked = self._free.asked
        self._far: set[int] = set()
        self._module = module
        self._is_opened = is_opened
        self._stack = ExitStack()
        self._watched: set[type] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is read until exit."""
        usual = {name: getattr(torch, name) for name in _SETTINGS}
        with self._stack:
            self._watch(nn.Module)
            written = self._writing(nn.Module.__setattr__)
            self._stack.enter_context(patched(nn.Module, "__setattr__", written))
            for kind in {type(part) for part in self._module.modules()}:
                if "__getattribute__" in kind.__dict__:
                    self._watch(kind)
            for name, original in usual.items():
                self._stack.enter_context(patched(torch, name, self._setting(name, original)))
            environ = type(os.environ)
            watched = self._environment(environ.__getitem__)
            self._stack.enter_context(patched(environ, "__getitem__", watched))
            yield

    def note(self, holder: object, name: str) -> None:
        """Take note of a read."""
        if name in _MACHINERY or name.startswith("__") or not self._is_opened():
            return
        self._on_read(holder, name)
        key = (id(holder), name)
        if key in self.noted or key in self.written:
            return
        if isinstance(holder, nn.Module) and id(holder) not in self.names:
            return
        if is_ours(sys._getframe(2).f_code.co_filename):
            return
        self._note(holder, name, key)

    def note_whole(self, function: object, owner: nn.Module | None, names: Iterable[str]) -> None:
        """Take note of what a function that stays one call can read off its module."""
        self._free.note(function)
        for name in names:
            if (id(owner), name) not in self.noted:
                self._note(owner, name, (id(owner), name))

    def _note(self, holder: object, name: str, key: tuple[int, str]) -> None:
        home, value = find(holder, name)
        if isinstance(value, functools.cached_property):
            self._free.note(value.func)
            home, value = "", MISSING
        if isinstance(value, types.MemberDescriptorType):  # kept in a slot
            text = f"{self.names.get(id(holder), '')}.{name}".strip(".")
            self._free.note_read(text, functools.partial(getattr, holder, name), key, user_frame())
            return
        if home == "class" and hasattr(type(value), "__get__"):
            self._free.note(value)  # a method or a property
            return
        if id(holder) in self._far and not is_atom(value):
            return
        self._free.note(value)
        self.noted[key] = Read(holder, name, home, value, _inside(value), user_frame())
        if home == "":
            self._computed(holder, name)
        for part in value if type(value) in (list, tuple) else (value,):
            if _is_object(part):
                self.names.setdefault(
                    id(part), f"{self.names.get(id(holder), '')}.{name}".strip(".")
                )
                self._watch(type(part))

    def _computed(self, holder: object, name: str) -> None:
        """Take note of what a `__getattr__` of the user's returns."""
        made = getattr(type(holder), "__getattr__", None)
        if made is None or made is nn.Module.__getattr__:
            return
        with suppress(Exception):
            value = getattr(holder, name)
            if is_atom(value):
                is_module = isinstance(holder, nn.Module)
                found: Callable[[], object] = weakref.ref(holder) if is_module else lambda: holder
                text = f"{self.names.get(id(holder), '')}.{name}".strip(".")

                def ask() -> object:
                    held = found()
                    return value if held is None else getattr(held, name)

                self.asked.setdefault((id(holder), name), Asked(text, ask, value, user_frame()))

    def note_code(self, frame: types.FrameType | None) -> None:
        """Take note of what the user's code that is running can read, up to the module's call."""
        while frame is not None and is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None and not is_ours(frame.f_code.co_filename):
            if is_users(frame.f_code.co_filename):
                self._free.note_code(frame.f_code, frame.f_globals)
            frame = frame.f_back

    def note_module(self, module: nn.Module) -> None:
        """Take note of what the forward of an opened module can read."""
        self._free.note(module.forward)

    def _watch_global(self, value: object, name: str) -> None:
        if _is_object(value) and id(value) not in self.names:
            self.names[id(value)] = name
            self._far.add(id(value))
            self._watch(type(value))

    def forget(self, read: Read) -> None:
        """Have nobody compare an attribute, as for a cache that the code fills itself."""
        del self.noted[id(read.holder), read.name]

    def empty_caches(self) -> None:
        """Put back what was in caches before the run."""
        for read in self.caches:
            place = own_attributes(read.holder)
            place = place[read.home] if read.home in PLACES else place
            if read.value is MISSING:
                place.pop(read.name, None)
            elif read.home != "class":
                place[read.name] = read.value
                if type(read.value) is dict:
                    for key in [key for key in read.value if key not in read.inside[0]]:
                        del read.value[key]

    def carried(self) -> Iterator[tuple[Read, object]]:
        """Yield what the code read and then changed, with the new value.

        Not tensors that another tensor replaces: those are buffers, or refused elsewhere.
        """
        for read in list(self.noted.values()):
            home, now = find(read.holder, read.name)
            if isinstance(read.value, torch.Tensor) or home == "class":
                continue
            if now is read.value:
                if read.inside is not None and _inside(now) != read.inside:
                    yield read, now
            elif not (is_atom(now) and type(now) is type(read.value) and now == read.value):
                yield read, now

    def _watch(self, kind: type) -> None:
        if kind in self._watched:
            return
        self._watched.add(kind)
        owner: Any = kind
        original = owner.__getattribute__
        reads = self

        def read(self: object, name: str) -> object:
            reads.note(self, name)
            return original(self, name)

        with suppress(TypeError):  # a class of C code
            self._stack.enter_context(patched(kind, "__getattribute__", read))

    def _writing(self, original: Callable[..., None]) -> Callable[..., None]:
        def write(module: nn.Module, name: str, value: object) -> None:
            original(module, name, value)
            if self._is_opened() and name in own_attributes(module):
                self.written.add((id(module), name))

        return write

    def _setting(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        usual: dict[tuple[object, ...], object] = {}
        for args in ((), *((kind,) for kind in device_kinds())):
            with suppress(TypeError):
                usual[args] = original(*args)

        def ask(*args: object) -> object:
            value = original(*args)
            # What the code has set for itself is not of the world.
            is_worlds = args in usual and usual[args] == value
            if is_worlds and self._is_opened() and is_users(sys._getframe(1).f_code.co_filename):
                asked = Asked(
                    f"torch.{name}()", functools.partial(original, *args), value, user_frame()
                )
                self.asked.setdefault((name, args), asked)
            return value

        return ask

    def _environment(self, original: Callable[..., object]) -> Callable[..., object]:
        def read(environ: object, name: str) -> object:
            key = ("environment", name)
            if environ is os.environ and self._is_opened() and key not in self.asked:
                value = None
                with suppress(KeyError):
                    value = original(environ, name)
                ask = functools.partial(os.environ.get, name)
                self.asked[key] = Asked(f"os.environ[{name!r}]", ask, value, user_frame())
            return original(environ, name)

        return read


def _inside(value: object) -> object:
    """Describe what is in a container or an object; None for anything else."""
    if isinstance(value, CONTAINERS) or _is_object(value):
        return contents(value)
    return unseen(value)


def _is_object(value: object) -> bool:
    """Say whether a value is an object of a class of the user's, whose reads can be seen."""
    kind = type(value)
    return (
        bool(kind.__flags__ & (1 << 9))  # made by a class statement
        and not isinstance(value, (nn.Module, torch.Tensor, type))
        and not is_atom(value)
        and not kind.__module__.startswith(("torch.", "builtins", "collections", "logging"))
        and (hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__))
    )
