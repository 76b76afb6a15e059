"""The gradient norm of the whole model, from every rank's part, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fxpipe.runtime.session import Session

__all__ = ["clip_gradients", "gradient_norm"]


def gradient_norm(session: Session, norm_type: float) -> float:
    """The norm over all stages of all ranks; a tied parameter counts once.

    Every rank adds the stages' parts in stage order, so all get the same number.
    """
    peers = session.peers
    skipped: set[int] = set()
    for group in peers.tied:
        for rank, copies in group.parameters.items():
            skipped |= {id(p) for p in (copies[1:] if rank == group.owner else copies)}
    mine: dict[int, float] = {}
    for index, stage in sorted(session.stages.items()):
        grads = []
        for p in stage.submod.parameters():
            if p.grad is not None and id(p) not in skipped:
                grads.append(p.grad)
                skipped.add(id(p))
        mine[index] = _part(grads, norm_type)
    parts: dict[int, float] = {}
    for found in peers.control.gather(mine):
        parts.update(found)
    values = [parts[index] for index in sorted(parts)]
    if math.isinf(norm_type):
        return max(values)
    return float(sum(values) ** (1.0 / norm_type))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, total: float) -> None:
    """Scale gradients down so that their common norm is at most `max_norm`."""
    factor = max_norm / (total + 1e-6)
    if factor < 1.0:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(factor)


def _part(grads: Sequence[torch.Tensor], norm_type: float) -> float:
    if not grads:
        return 0.0
    norms = [torch.linalg.vector_norm(grad.detach(), norm_type) for grad in grads]
    # A sharded gradient's norm is spread over its mesh.
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    values = torch.stack([norm.double().to(whole[0].device) for norm in whole])
    if math.isinf(norm_type):
        return float(values.max())
    return float(values.pow(norm_type).sum())
