"""Clip by the gradient norm of the whole model, from every rank's part, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxpipe.errors import InputError
from fxpipe.runtime.session import Session
from fxpipe.runtime.wire.failure import described, raise_problems

__all__ = ["clip"]


def clip(session: Session, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`; the norm before.

    Every rank adds the stages' parts in stage order, so all get the same number. A tied parameter
    counts once. As in torch, a norm that is no number makes every gradient NaN.

    Raises:
        InputError: on all ranks, which pass different arguments, or whose norm is not finite.
    """
    mine: dict[int, float] = {}
    problem: BaseException | None = None
    with session.call("clip_grad_norm_") as control:
        try:
            asked = [float(max_norm), float(norm_type), bool(error_if_nonfinite)]
            mine = _parts(session, norm_type)
        except BaseException as error:
            problem, asked = error, []
        control.exchange([])  # every call begins with one: so different calls are noticed
        told = None if problem is None else described(problem)
        said = control.gather((told, repr(asked), mine))
        with control.alike(problem):
            raise_problems([one[0] for one in said], problem)
            if len({one[1] for one in said}) > 1:
                shown = ", ".join(f"rank {rank} passes {one[1]}" for rank, one in enumerate(said))
                raise InputError(
                    "clip_grad_norm_ needs the same max_norm, norm_type and error_if_nonfinite on "
                    f"all ranks, but {shown}"
                )
            parts = {index: part for one in said for index, part in one[2].items()}
            total = _norm_of_norms([parts[index] for index in sorted(parts)], norm_type)
            if error_if_nonfinite and not math.isfinite(total):
                raise InputError(
                    f"the gradient norm is {total}; gradients were left as they are. "
                    "Pass error_if_nonfinite=False to clip all the same"
                )
    factor = max_norm / (total + 1e-6)
    if not factor >= 1.0:
        for p in session.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
    return total


def _parts(session: Session, norm_type: float) -> dict[int, float]:
    """The norm of each stage of this process."""
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
    return mine


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
