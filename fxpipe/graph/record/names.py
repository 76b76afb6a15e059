"""The names that modules, parameters and buffers have in a model.

A module or tensor may have several; which is meant depends on whose code uses it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

__all__ = ["Names"]


class Names:
    """Names by object; `inside` is the module whose code is running, if any."""

    def __init__(self, module: nn.Module) -> None:
        self._modules: dict[int, list[str]] = {}
        self._kinds: dict[type, list[str]] = {}
        self._state: dict[int, list[str]] = {}
        for name, part in module.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(part), []).append(name)
            self._kinds.setdefault(type(part), []).append(name)
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            self._state.setdefault(id(tensor), []).append(name)

    def of(self, module: nn.Module, inside: nn.Module | None) -> str | None:
        """Return a module's name, one inside the running module if there are several."""
        names = self._modules.get(id(module))
        if not names:
            return None
        if len(names) > 1 and inside is not None:
            around = self._modules.get(id(inside), [""])[0]
            for name in names:
                if name.startswith(f"{around}."):
                    return name
        return names[0]

    def of_kinds(self, kinds: Collection[type]) -> list[str]:
        """Return the names of all modules of some classes."""
        return [name for kind, names in self._kinds.items() if kind in kinds for name in names]

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a parameter or a buffer."""
        return id(tensor) in self._state

    def of_state(self, tensor: torch.Tensor, inside: nn.Module | None) -> str | None:
        """Return the name of a parameter or buffer, preferably the running module's own."""
        names = self._state.get(id(tensor))
        if not names:
            return None
        owner = self.of(inside, inside) if inside is not None else ""
        for name in names:
            if name.rpartition(".")[0] == owner:
                return name
        return names[0]
