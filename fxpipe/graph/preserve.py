"""Leave a model and the process exactly as they were, also after an error.

`preserved(module)` saves and restores what a run of the module could change
without touching tensor contents: attributes, submodules, hooks, training flags,
`requires_grad`, and the random states of torch, Python and numpy. A run on fake
tensors changes no more than that. `preserved_values` also saves the contents of
parameters and buffers, for the rare run on real tensors.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["local_tensor", "preserved", "preserved_values"]

_MUTABLE = (dict, list, set)


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Restore attributes, flags and random states on exit."""
    modules = [(part, _snapshot(part)) for part in module.modules()]
    flags = [(p, p.requires_grad) for p in module.parameters()]
    rng = _random_states()
    try:
        yield
    finally:
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


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor (comparing whole ones communicates)."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


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
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
