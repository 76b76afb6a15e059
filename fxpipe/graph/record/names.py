"""Where in the model the code is that runs now: the names it uses, the settings it is under.

A module or tensor may have several names; which is meant depends on whose code uses it. The
settings are for the stage to restore: autocast and gradient settings, `checkpoint()` regions,
and the dtypes that the code read off tensors before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxpipe.graph.facts import Ambient, Region
from fxpipe.torch_inside import autocast_settings

__all__ = ["Names", "Surroundings"]


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


class Surroundings:
    """The settings at this point of the run."""

    def __init__(self) -> None:
        self._autocast: list[tuple[Any, ...]] = []
        self._regions: list[Region] = []
        self.dtypes_read: Mapping[torch.dtype, fx.Node | None] = {}

    def autocast(self, region: Any, entering: bool) -> None:
        """Follow an autocast region."""
        if entering:
            self._autocast.append(autocast_settings(region))
        elif self._autocast:
            self._autocast.pop()

    def checkpoint(self, options: dict[str, Any], entering: bool) -> None:
        """Follow a `checkpoint()`."""
        if entering:
            self._regions.append(Region(options))
        else:
            self._regions.pop()

    def reentrant(self, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run what a `checkpoint()` with `use_reentrant=True` runs."""
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # as this variant of checkpoint does it
                return run(*args)
        options = {"preserve_rng_state": preserve}
        self.checkpoint(options, entering=True)
        try:
            return run(*args)
        finally:
            self.checkpoint(options, entering=False)

    def dtype_read(self, dtype: torch.dtype, source: fx.Node | None) -> None:
        """Remember the tensor that a dtype was last read off; None for state."""
        self.dtypes_read = {**self.dtypes_read, dtype: source}

    def ambient(self) -> Ambient:
        """Return the settings that are not the usual ones."""
        return Ambient(None if torch.is_grad_enabled() else False, tuple(self._autocast))

    def regions(self) -> tuple[Region, ...]:
        """Return the `checkpoint()`s that are running, outermost first."""
        return tuple(self._regions)
