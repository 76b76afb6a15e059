"""Known models by name (`llama3-70b`), without weights: to plan with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxpipe.cli.named.models import ModelRequest, NamedModel
from fxpipe.errors import InputError
from fxpipe.planner.known_models import KNOWN, known_model

__all__ = ["KnownModel"]


class KnownModel(NamedModel):
    """A published model by its name; it exists on the meta device only."""

    is_built_on_meta_by_default = True

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self.sizes = KNOWN[request.name.lower()]

    @property
    def title(self) -> str:
        return self.request.name

    @property
    def length(self) -> int:
        return self.request.seq or self.sizes.length

    def build(self, *, meta: bool = True) -> nn.Module:
        if not meta:
            raise InputError(f"{self.title} has no weights here: it is for planning only")
        return known_model(self.sizes, sequence=self.length, dtype=self.request.torch_dtype)[0]

    def _make(self) -> Any:
        return self.build()

    def _own_inputs(self, batch: int, seed: int) -> Any:
        return (torch.zeros(batch, self.length, dtype=torch.long, device="meta"),)

    def _own_target(self, batch: int, seed: int) -> Any:
        return torch.zeros(batch, self.length, dtype=torch.long, device="meta")

    def _own_loss(self) -> Callable[..., Any]:
        raise InputError(f"{self.title} has no weights here: it is for planning only")
