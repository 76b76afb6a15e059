"""The gradient norm of the whole model, from every rank's part, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fxpipe.runtime.session import Session

__all__ = ["clip_gradients", "gradient_norm"]


def gradient_norm(session: Session, norm_type: float) -> float:
    """The norm over all stages of all ranks; a tied parameter counts once.

    Every rank adds the stages' parts in stage order, so all get the same number.
    """
    skipped: set[int] = set()
    for group in session.tied():
        for rank, copies in group.parameters.items():
            skipped |= {id(p) for p in (copies[1:] if rank == group.owner else copies)}
    mine: dict[int, float] = {}
    for index, stage in sorted(session.stages.items()):
        grads = []
        for p in stage.submod.parameters():
            if p.grad is not None and id(p) not in skipped:
                grads.append(p.grad)
                skipped.add(id(p))
        if grads:
            mine[index] = _part(grads, norm_type)
    parts: dict[int, float] = {}
    with session.call("clip_grad_norm_") as control:
        control.exchange([])  # every call begins with one: so different calls are noticed
        for found in control.gather(mine):
            parts.update(found)
    return _norm_of_norms([parts[index] for index in sorted(parts)], norm_type)


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, total: float) -> None:
    """Scale gradients down so that their common norm is at most `max_norm`.

    As in torch, a norm that is no number makes every gradient NaN.
    """
    factor = max_norm / (total + 1e-6)
    if factor >= 1.0:
        return
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def _part(grads: Sequence[torch.Tensor], norm_type: float) -> float:
    norms = [torch.linalg.vector_norm(grad.detach(), norm_type) for grad in grads]
    # A sharded gradient's norm is spread over its mesh.
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    values = torch.stack([norm.double().to(whole[0].device) for norm in whole])
    return float(torch.linalg.vector_norm(values, norm_type))


def _norm_of_norms(parts: Sequence[float], norm_type: float) -> float:
    if not parts:
        return 0.0
    if norm_type == 0:  # torch counts the parameters whose gradient is not all zero
        return sum(parts)
    values = torch.tensor(parts, dtype=torch.float64, device="cpu")
    return float(torch.linalg.vector_norm(values, norm_type))
