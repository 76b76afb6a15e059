"""Leave a model and the process exactly as they were, also after an error.

`preserved(module)` saves and restores what a run of the module could change without touching
tensor contents: every place that its code can reach, `requires_grad`, and the random states of
torch, Python and numpy. A run on fake tensors changes no more than that. `preserved_values` also
saves the contents of parameters and buffers, for the rare run on real tensors.

`Places` are the attributes of a model's modules and of the objects they keep, lists, dicts and
sets, what functions and hooks close over, the attributes of its classes and the globals of the
files that define them, each beside a copy; and the states of random generators among them. A run
on fake tensors may leave some of them in a cache that the next run of the plain model would use.
The walk goes from near to far and ends `_MOST` places beyond the modules, so that a model made of
a large package is not searched for long. What C code keeps is not seen.

Accelerators are found by what they can do (`torch.accelerator`), not by their name. One that is
there but was not used yet has no random state: to ask for it would start it.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn

from fxpipe.torch_inside import local_tensor

__all__ = [
    "Places",
    "device_kinds",
    "preserved",
    "preserved_random",
    "preserved_values",
    "put_back",
    "random_states",
    "seed_all",
]


def device_kinds() -> tuple[str, ...]:
    """The CPU, and the kind of accelerator that this torch was made for."""
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None or found.type == "cpu" else ("cpu", found.type)


def random_states() -> dict[str, Any]:
    """The state of each generator, by what people call it."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "Python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for kind, home in _accelerators():
        for place in range(home.device_count()):
            states[f"{kind}:{place}"] = home.get_rng_state(torch.device(kind, place))
    return states


def put_back(states: dict[str, Any]) -> None:
    """Set each generator to a state that `random_states` has found."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["Python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    for kind, home in _accelerators():
        for place in range(home.device_count()):
            if f"{kind}:{place}" in states:
                home.set_rng_state(states[f"{kind}:{place}"], torch.device(kind, place))


@contextmanager
def preserved_random() -> Iterator[None]:
    """Restore the states of all generators on exit."""
    states = random_states()
    try:
        yield
    finally:
        put_back(states)


def seed_all(seed: int) -> None:
    """Set every generator to the same state, whatever it was."""
    torch.default_generator.manual_seed(seed)
    for _, home in _accelerators():
        # MPS has one device, and only this name.
        (getattr(home, "manual_seed_all", None) or home.manual_seed)(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _accelerators() -> Iterator[tuple[str, types.ModuleType]]:
    for kind in device_kinds()[1:]:
        home = torch.get_device_module(kind)
        is_used = getattr(home, "is_initialized", home.is_available)
        if home.is_available() and is_used() and hasattr(home, "get_rng_state"):
            yield kind, home


@contextmanager
def preserved(
    module: nn.Module, *, far: bool = True, places: Places | None = None
) -> Iterator[None]:
    """Restore attributes, flags and random states on exit.

    `far` goes beyond what modules hold themselves. `places` are those of an earlier time.
    """
    places = places or Places(module, far=far)
    flags = [(p, p.requires_grad) for p in module.parameters()]
    with preserved_random():
        try:
            yield
        finally:
            places.restore()
            for parameter, flag in flags:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)


@contextmanager
def preserved_values(module: nn.Module) -> Iterator[None]:
    """Restore the contents of parameters and buffers on exit."""
    state = (*module.parameters(), *module.buffers())
    tensors = [local_tensor(tensor) for tensor in state if not tensor.is_meta]
    saved = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


_MOST = 2_000
_CONTAINERS = (dict, list, set, collections.deque)
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device,
    torch.Size, types.BuiltinFunctionType, types.ModuleType, range, slice,
)  # fmt: skip
_Cache: TypeAlias = "functools._lru_cache_wrapper[object]"
_LRU_CACHE = type(functools.lru_cache(maxsize=None)(lambda: None))
_FOREIGN = frozenset({"torch", "numpy", "sympy", "fxpipe", "pytest", "_pytest"})
# What a file makes when it is first used, and should make once: not put back.
_DEFINED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class Places:
    """The places of a model, as they were when this was made."""

    def __init__(self, module: nn.Module, *, far: bool = True) -> None:
        self._seen: set[int] = set()
        self._held: list[tuple[object, object]] = []
        self._caches: dict[int, tuple[_Cache, int]] = {}
        self._random: list[tuple[Callable[[Any], Any], Any]] = []
        self._code: collections.deque[object] = collections.deque()
        self._queue: collections.deque[object] = collections.deque(module.modules())
        self._finish_queue()
        most = len(self._held) + _MOST
        while far and self._code and len(self._held) < most:
            self._visit_code(self._code.popleft())
            self._finish_queue()

    def restore(self) -> None:
        """Put back what has changed."""
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may hold fake tensors now
        for put_back, state in self._random:
            put_back(state)
        for place, content in self._held:
            if not _is_same(place, content):
                _put_back(place, content)

    def have_changed(self) -> bool:
        """Say whether a place holds something else now."""
        return not all(_is_same(place, content) for place, content in self._held)

    def _finish_queue(self) -> None:
        while self._queue:
            self._visit(self._queue.popleft())

    def _visit(self, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._object(value)
        elif isinstance(value, _CONTAINERS):
            self._hold(value)
        elif isinstance(value, (tuple, frozenset)):
            self._queue.extend(value)
        elif isinstance(value, torch.Generator):
            self._random.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._random.append((value.setstate, value.getstate()))
        elif type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
            bits = value.bit_generator
            self._random.append((functools.partial(setattr, bits, "state"), bits.state))
        elif type(value).__module__.startswith("numpy.random") and hasattr(value, "set_state"):
            self._random.append((value.set_state, value.get_state()))
        else:
            self._code.append(value)

    def _visit_code(self, value: object) -> None:
        if isinstance(value, types.FunctionType):
            self._queue.extend(value.__closure__ or ())
            self._queue.extend((value.__defaults__, value.__kwdefaults__, vars(value)))
            self._file(value.__module__)
        elif isinstance(value, types.CellType):
            self._hold(value)
        elif isinstance(value, types.MethodType):
            self._queue.extend((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            self._queue.extend((value.func, value.args, value.keywords))
        elif isinstance(value, (staticmethod, classmethod)):
            self._queue.append(value.__func__)
        elif _is_cache(value):
            self._caches[id(value)] = (value, value.cache_info().misses)
            self._queue.append(value.__wrapped__)
        elif isinstance(value, type):
            if not _is_foreign(value.__module__):
                self._hold(value)
                self._file(value.__module__)
                # A method that keeps tensors of earlier runs would make them part of a trace.
                for cache in filter(_is_cache, vars(value).values()):
                    cache.cache_clear()
        elif not _is_foreign(type(value).__module__):
            self._object(value)

    def _object(self, value: object) -> None:
        if hasattr(value, "__dict__"):
            self._seen.add(id(vars(value)))
            self._hold(vars(value))
        kinds = type(value).__mro__
        self._queue.extend(kind for kind in kinds if not _is_foreign(kind.__module__))
        if not isinstance(value, nn.Module) and any(vars(k).get("__slots__") for k in kinds):
            self._hold(_Slots(value))

    def _file(self, name: str) -> None:
        found = sys.modules.get(name)
        if found is not None and not _is_foreign(name) and id(found) not in self._seen:
            self._seen.add(id(found))
            self._seen.add(id(vars(found)))
            self._held.append((_Globals(vars(found)), dict(vars(found))))
            self._queue.extend(value for value in vars(found).values() if _is_of(value, name))

    def _hold(self, place: object) -> None:
        content = _content(place)
        self._held.append((place, content))
        self._queue.extend(_values(content))


def _is_cache(value: object) -> TypeGuard[_Cache]:
    return type(value) is _LRU_CACHE


class _Slots:
    """An object whose attributes are in slots."""

    def __init__(self, value: object) -> None:
        self.value = value

    def read(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for kind in type(self.value).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(self.value, name):
                    found[name] = getattr(self.value, name)
        return found


class _Globals:
    """The names that a file defines."""

    def __init__(self, names: dict[str, object]) -> None:
        self.names = names


def _content(place: Any) -> Any:
    if isinstance(place, types.CellType):
        try:
            return [place.cell_contents]
        except ValueError:  # not yet filled
            return []
    if isinstance(place, _Slots):
        return place.read()
    if isinstance(place, type):
        return dict(vars(place))
    if isinstance(place, _Globals):
        return dict(place.names)
    if isinstance(place, dict):
        return dict(_kind_of(place).items(place))
    return list(place) if isinstance(place, (list, collections.deque)) else set(place)


def _values(content: Any) -> Iterable[object]:
    return list(content.values()) if isinstance(content, dict) else content


def _is_same(place: Any, before: Any) -> bool:
    now = place if isinstance(place, _CONTAINERS) else _content(place)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(is_, now, before)) and all(map(is_, dict.values(now), before.values()))
    return bool(now == before) if isinstance(now, set) else all(map(is_, now, before))


def _put_back(place: Any, before: Any) -> None:
    if isinstance(place, types.CellType):
        if before:
            place.cell_contents = before[0]
        else:
            del place.cell_contents
    elif isinstance(place, (type, _Slots)):
        owner = place.value if isinstance(place, _Slots) else place
        for name, value in _differences(_content(place), before):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
    elif isinstance(place, _Globals):
        for name, value in _differences(place.names, before):
            if value is _MISSING:
                del place.names[name]
            else:
                place.names[name] = value
    elif isinstance(place, list):
        list.__setitem__(place, slice(None), before)
    elif isinstance(place, dict):
        _kind_of(place).clear(place)
        _kind_of(place).update(place, before)
    else:
        place.clear()
        (place.extend if isinstance(place, collections.deque) else place.update)(before)


def _kind_of(place: dict[object, object]) -> type[dict[object, object]]:
    """Return the class whose methods see all of a dict, but no code of a user's subclass.

    An OrderedDict keeps its order beside the dict: the methods of dict would break it.
    """
    return collections.OrderedDict if isinstance(place, collections.OrderedDict) else dict


_MISSING = object()


def _differences(now: dict[str, object], before: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the names that changed, with what they were; a definition is not undone."""
    for name in [*now, *(name for name in before if name not in now)]:
        old = before.get(name, _MISSING)
        new = now.get(name, _MISSING)
        if new is not old and not isinstance(new, _DEFINED) and not name.startswith("__"):
            yield name, old


def _is_of(value: object, name: str) -> bool:
    """Say whether a value among the globals of a file belongs to it, or holds values."""
    if isinstance(value, (type, types.FunctionType)):
        return not _is_foreign(value.__module__)
    return not isinstance(value, _ATOMS)


def _is_foreign(name: object) -> bool:
    return not isinstance(name, str) or _is_known(name)


@functools.cache
def _is_known(name: str) -> bool:
    top = name.partition(".")[0]
    return top in _FOREIGN or top in sys.stdlib_module_names
