"""What opened code was under when it ran an operation, for the stage to restore.

Autocast and gradient settings, `checkpoint()` regions, and the dtypes that the
code read off tensors before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.graph.facts import Ambient, Region
from fxpipe.torch_inside import autocast_settings

__all__ = ["Surroundings"]


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
