"""Take back what a failed step has done to gradients and buffers.

Gradients that were there before are copied, if there are any: a failed backward cannot be undone
by computing. Buffers are copied if steps have been seen to change them (BatchNorm's statistics);
at the first step all are. A buffer that changes for the first time in a step that fails is named.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fxpipe.torch_inside import buffers_of, version_of

__all__ = ["ChangingBuffers", "Rollback"]


class ChangingBuffers:
    """Which buffers steps change; remembered from step to step."""

    def __init__(self) -> None:
        self.is_known = False
        self.names: set[str] = set()


def _is_changed(buffer: torch.Tensor, version: int, before: torch.Tensor | None) -> bool:
    # BatchNorm's kernel changes its statistics without counting a version: compare values, too.
    return version_of(buffer) != version or (before is not None and not torch.equal(buffer, before))


class Rollback:
    """The gradients and buffers of some modules as they are now."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        modules: Iterable[tuple[str, nn.Module]],
        changing: ChangingBuffers,
    ) -> None:
        self._changing = changing
        self._grads: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []
        for p in parameters:
            grad = p.grad
            self._grads.append((p, grad, None if grad is None else grad.detach().clone()))
        self._held: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        self._buffers: list[tuple[str, torch.Tensor, int, torch.Tensor | None]] = []
        seen: set[int] = set()
        for path, module in modules:
            buffers = buffers_of(module)
            if not buffers:
                continue
            self._held.append((module, dict(buffers)))
            for key, buffer in buffers.items():
                if buffer is None or id(buffer) in seen or buffer.is_inference():
                    continue
                seen.add(id(buffer))
                name = f"{path}.{key}"
                keep = not changing.is_known or name in changing.names
                copy = buffer.detach().clone() if keep and not buffer.is_meta else None
                self._buffers.append((name, buffer, version_of(buffer), copy))

    def commit(self) -> None:
        """The step succeeded: remember which buffers it changed."""
        for name, buffer, version, before in self._buffers:
            if name not in self._changing.names and _is_changed(buffer, version, before):
                self._changing.names.add(name)
        self._changing.is_known = True
        self._grads, self._buffers, self._held = [], [], []

    def undo(self) -> list[str]:
        """Put everything back; names of buffers that cannot be."""
        lost = []
        with torch.no_grad():
            for p, grad, copy in self._grads:
                if grad is not None and copy is not None:
                    grad.copy_(copy)
                if p.grad is not grad:
                    p.grad = grad
            for name, buffer, version, before in self._buffers:
                if before is None and version_of(buffer) == version:
                    continue
                if before is None:
                    lost.append(name)
                else:
                    buffer.copy_(before)
                self._changing.names.add(name)
            for module, buffers in self._held:
                buffers_of(module).clear()
                buffers_of(module).update(buffers)
        self._grads, self._buffers, self._held = [], [], []
        return lost
