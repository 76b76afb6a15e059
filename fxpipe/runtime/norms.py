"""Clip by the gradient norm of the whole model, from every rank's part, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from fxpipe.errors import InputError
from fxpipe.runtime.control.control import Control, agree_on
from fxpipe.runtime.control.sums import sum_over_ranks
from fxpipe.runtime.parameters.tied import local
from fxpipe.runtime.session import Session
from fxpipe.runtime.wire.transport import TransportError

__all__ = ["clip"]


def clip(
    session: Session, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; the norm before.

    Every rank puts the stages' parts in stage order, so all get the same number. It stays on the
    device. A tied parameter counts once. As in torch, a norm that is no number makes every
    gradient NaN.

    Raises:
        InputError: on all ranks, which pass different arguments, or whose norm is not finite.
    """
    mine: dict[int, torch.Tensor] = {}
    problem: BaseException | None = None
    with session.call("clip_grad_norm_") as control:
        try:
            asked = [float(max_norm), float(norm_type), bool(error_if_nonfinite)]
            mine = _parts(session, norm_type)
        except BaseException as error:
            problem, asked = error, []
        control.exchange([])  # every call begins with one: so different calls are noticed
        what = "(max_norm, norm_type, error_if_nonfinite)"
        said = agree_on(control, what, tuple(asked), problem, sorted(mine))
        with control.alike():
            total = _total(session, control, mine, {i for one in said for i in one}, norm_type)
            if error_if_nonfinite and not math.isfinite(total):
                raise InputError(
                    f"the gradient norm is {float(total)}; gradients were left as they are. "
                    "Pass error_if_nonfinite=False to clip all the same"
                )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in session.parameters():
        if p.grad is not None:
            local(p.grad).mul_(factor.to(p.grad.device))
    return total.to(torch.get_default_dtype())


def _total(
    session: Session,
    control: Control,
    mine: Mapping[int, torch.Tensor],
    known: Collection[int],
    norm_type: float,
) -> torch.Tensor:
    """The norm of the norms of all stages that have one."""
    device = next(iter(session.stages.values())).device
    parts = torch.zeros(session.program.num_stages, dtype=torch.float64, device=device)
    for index, part in mine.items():
        parts[index] = part.to(device)
    try:
        parts = sum_over_ranks(parts, control, session.transports(control))
    except TransportError as error:
        raise control.lost(error) from error
    found = [parts[index] for index in sorted(known)]
    if not found:
        return parts.sum()
    if norm_type == 0:  # torch counts the parameters whose gradient is not all zero
        return torch.stack(found).sum()
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(found), norm_type)
    return norm


def _parts(session: Session, norm_type: float) -> dict[int, torch.Tensor]:
    """The norm of each stage of this process."""
    skipped: set[int] = set()
    for group in session.tied():
        for rank, copies in group.parameters.items():
            skipped |= {id(p) for p in (copies[1:] if rank == group.owner else copies)}
    mine: dict[int, torch.Tensor] = {}
    for index, stage in sorted(session.stages.items()):
        grads = []
        for p in stage.submod.parameters():
            if p.grad is not None and id(p) not in skipped:
                grads.append(p.grad)
                skipped.add(id(p))
        if grads:
            mine[index] = _part(grads, norm_type)
    return mine


def _part(grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of some gradients. Those that are spread over a mesh meet there once."""
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        one = torch.linalg.vector_norm(grad.detach(), norm_type)
        by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(one)
    whole: list[torch.Tensor] = []
    for mesh, norms in by_mesh.items():
        if mesh is None:
            whole += norms
        else:
            whole += torch.stack(norms).full_tensor().unbind()  # type: ignore[attr-defined]
    values = torch.stack([norm.double().to(whole[0].device) for norm in whole])
    norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm
