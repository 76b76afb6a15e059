"""Which parameters of a stage want a gradient: replicas reduce those, and must have the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import nn

__all__ = ["Trained"]

_SHOWN = 3


class Trained:
    """The parameters of some modules that want a gradient, when this is made."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        named = [pair for module in modules for pair in module.named_parameters()]
        self._frozen = [name for name, p in named if not p.requires_grad]
        self._count = len(named)
        self.digest = zlib.crc32(bytes(p.requires_grad for _, p in named))

    def __str__(self) -> str:
        if not self._frozen:
            return f"all {self._count} parameters"
        shown = ", ".join(self._frozen[:_SHOWN]) + ", ..." * (len(self._frozen) > _SHOWN)
        return f"{self._count - len(self._frozen)} of {self._count} parameters (not {shown})"
