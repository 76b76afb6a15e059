"""Leave a model and the process exactly as they were, also after an error.

`preserved(module)` saves and restores what a run of the module could change
without touching tensor contents: attributes, submodules, hooks, training flags,
`requires_grad`, and the random states of torch, Python and numpy. A run on fake
tensors changes no more than that. `preserved_values` also saves the contents of
parameters and buffers, for the rare run on real tensors.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxpipe.torch_inside import local_tensor

__all__ = ["preserved", "preserved_values"]

_MUTABLE = (dict, list, set)


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Restore attributes, flags and random states on exit."""
    modules = [(part, _snapshot(part)) for part in module.modules()]
    flags = [(p, p.requires_grad) for p in module.parameters()]
    rng = _random_states()
    caches = _caches(module)
    try:
        yield
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it holds fake tensors now
        for part, snapshot in modules:
            _restore(part, snapshot)
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        _restore_random_states(rng)


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


def _caches(module: nn.Module) -> list[tuple[Any, int]]:
    """Return the `lru_cache`s of the model's code; those of its methods are emptied.

    A method that keeps tensors from earlier runs would make them part of the trace.
    """
    found: dict[int, Any] = {}
    homes: set[str] = set()
    for kind in {parent for part in module.modules() for parent in type(part).__mro__}:
        if kind.__module__.startswith(("torch.", "builtins")):
            continue
        homes.add(kind.__module__)
        for value in vars(kind).values():
            for cache in _caches_in(value):
                cache.cache_clear()
                found[id(cache)] = cache
    for home in homes:
        for value in vars(sys.modules[home]).values() if home in sys.modules else ():
            found.update({id(cache): cache for cache in _caches_in(value)})
    return [(cache, cache.cache_info().misses) for cache in found.values()]


def _caches_in(value: Any) -> list[Any]:
    value = getattr(value, "__func__", value) if isinstance(value, _WRAPPERS) else value
    candidates = [value]
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                candidates.append(cell.cell_contents)
            except ValueError:  # not yet filled
                continue
    return [candidate for candidate in candidates if type(candidate) is _LRU_CACHE]


_WRAPPERS = (staticmethod, classmethod)
_LRU_CACHE = type(functools.lru_cache(maxsize=None)(lambda: None))


def _snapshot(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    attributes = dict(part.__dict__)
    contents = {
        name: value.copy()
        for name, value in attributes.items()
        if isinstance(value, _MUTABLE) and value.__class__.__module__ in ("builtins", "collections")
    }
    return attributes, contents


def _restore(part: nn.Module, snapshot: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, contents = snapshot
    current = part.__dict__
    for name in [name for name in current if name not in attributes]:
        del current[name]
    for name, value in attributes.items():
        if current.get(name, part) is not value:
            current[name] = value
    for name, content in contents.items():
        value = attributes[name]
        if isinstance(value, list):
            if len(value) != len(content) or any(map(_differs, value, content)):
                value[:] = content
        elif isinstance(value, dict):
            if len(value) != len(content) or any(
                _differs(value.get(k, value), content[k]) for k in content
            ):
                value.clear()
                value.update(content)
        elif value != content:
            value.clear()
            value.update(content)


def _differs(new: Any, old: Any) -> bool:
    return new is not old


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        states["cuda"] = cuda.get_rng_state_all()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
