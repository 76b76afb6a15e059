"""What one step knows: its targets, its loss, and what it collects on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.runtime.parameters.tied import GradStash, Scale
from fxpipe.runtime.stage.loss import LossTerm

__all__ = ["StepData"]


@dataclass(slots=True)
class StepData:
    """One step on one process. `weights[m]` is the share of microbatch m in the mean."""

    is_training: bool
    weights: Sequence[float]
    loss_fn: Callable[..., Any] | None
    targets: Sequence[Any] | None
    loss_kwargs: Sequence[Mapping[str, Any]]
    keeps_outputs: bool
    wants_loss: bool
    autocast: tuple[str, ...]
    batch_weight: float = 1.0  # that sums are divided by, as far as it is known
    grad_scale: float = 1.0
    """A factor of all gradients; what is reported as loss is without it."""
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, LossTerm] = field(default_factory=dict)
    has_differentiated: bool = False
    aux: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    _asides: list[GradStash] = field(default_factory=list)
    _seeds: dict[tuple[float, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def seed(self, microbatch: int, term: torch.Tensor, *, is_aux: bool) -> torch.Tensor:
        """The factor of a term in the loss of the batch."""
        found = self.losses.get(microbatch)
        if found is not None and found.weight is not None and not is_aux:
            return self._seed(self.grad_scale / self.batch_weight, term)
        return self._seed(self.weights[microbatch] * self.grad_scale, term)

    def put_aside(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Tell what this step adds to these gradients apart from what is there.

        Returns those that are neither known yet nor parameters of this process's stages.
        """
        known = {id(leaf) for aside in self._asides for leaf in aside.leaves}
        if len(known) < len(leaves):  # the stages' own parameters are put aside already
            known |= {id(p) for module in self.modules for p in module.parameters()}
        new = [leaf for leaf in leaves if id(leaf) not in known]
        if new:
            self._asides.append(GradStash(new))
        return new

    def restore(self, scale: Scale) -> None:
        """The step succeeded: add what it has added, times `scale`."""
        for aside in self._asides:
            aside.restore(scale)
        self._asides.clear()

    def undo(self) -> None:
        """Forget what this step has added to gradients that were put aside."""
        for aside in self._asides:
            aside.undo()
        self._asides.clear()

    def _seed(self, factor: float, term: torch.Tensor) -> torch.Tensor:
        key = (factor, term.dtype)
        known = self._seeds.get(key)
        if known is None:
            known = self._seeds[key] = torch.full_like(term, factor, requires_grad=False)
        return known

    def no_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast does not belong around a backward, also when the step runs inside one."""
        if not self.autocast:
            return _NOTHING
        stack = contextlib.ExitStack()
        for device_type in self.autocast:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        return stack


_NOTHING = contextlib.nullcontext()
