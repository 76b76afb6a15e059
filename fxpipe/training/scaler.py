"""A gradient scaler for float16 that skips a step on all ranks, or on none.

    scaler = GradScaler(schedule, "cuda")
    with torch.autocast("cuda", torch.float16):
        schedule.step(x, target=y)          # gradients are scaled, the reported loss is not
    scaler.unscale_(optimizer)
    schedule.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()

An overflow on one stage, or in one shard, makes every rank skip the step and lower its scale:
otherwise stages would be of different steps, in silence. Saves and loads with a checkpoint:
`extra={"scaler": scaler}`. bfloat16 needs no scaler.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.runtime.control.control import agree
from fxpipe.training.state import HasStages, together

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's scaler for the stages of one process. See there for the options."""

    def __init__(self, schedule: Any, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self._schedule = getattr(schedule, "schedule", schedule)
        self._set_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and learn whether any rank found an overflow."""
        if not self.is_enabled():
            return
        source: HasStages = self._schedule
        found: dict[Any, torch.Tensor] = {}
        problem: BaseException | None = None
        with together("scaler", source, default_alone=False) as control:
            control.exchange([])  # ranks that make another call: nothing has been divided yet
            try:
                super().unscale_(optimizer)
                found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            except BaseException as error:
                problem = error
            overflows = any(bool(value) for value in found.values())
            rows = control.exchange([problem is not None, overflows])
            if any(row[0] for row in rows):
                agree(control, problem)
        anywhere = any(row[1] for row in rows)
        device = torch.device(self._device)
        found.setdefault(device, torch.zeros((), device=device))
        for value in found.values():
            value.fill_(float(anywhere))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Choose the next scale, the same on all ranks."""
        super().update(new_scale)
        self._set_scale()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_scale()

    def _set_scale(self) -> None:
        if self.is_enabled():
            self.scale(torch.ones((), device=self._device))  # makes the tensor of the scale
            self._schedule.grad_scale = self.get_scale()
