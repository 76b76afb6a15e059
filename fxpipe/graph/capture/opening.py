"""Decide which modules to open.

A module is opened only if a cut has to fall inside it; every other module stays
one call. Opening comes before the trace, and a policy cuts what was traced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

__all__ = ["ancestors", "choose_opened"]


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
