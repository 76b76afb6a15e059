"""Received activations as values that a module may use as if it had made them.

values, slots = receive(buffers, wants)
output = module(*values)
run_backward([output], [grad])
slots.take(i) -> to the sender
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Slots", "receive"]

# What makes received values require a gradient; it never gets one itself.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


class Slots:
    """Where the gradients of one microbatch's received values arrive."""

    __slots__ = ("_grads",)

    def __init__(self) -> None:
        self._grads: dict[int, Tensor] = {}

    def put(self, place: int, grad: Tensor) -> None:
        self._grads[place] = grad

    def take(self, place: int) -> Tensor | None:
        """The gradient of the value at `place`, None if it got none; let go of it here."""
        return self._grads.pop(place, None)


def receive(tensors: Sequence[Tensor], wants_grad: Sequence[bool]) -> tuple[list[Tensor], Slots]:
    """The same memory as values inside a graph, and the slots for their gradients.

    Unlike a leaf, such a value may be modified in place. Tensors that want no gradient
    are returned as they are.
    """
    slots = Slots()
    values = list(tensors)
    places = [place for place, wants in enumerate(wants_grad) if wants]
    if places:
        # Inside a list the tensors are no inputs of the Function, so its outputs are no views.
        received = _apply(_ANCHOR, slots, places, [values[place] for place in places])
        for place, value in zip(places, received, strict=True):
            values[place] = value
    return values, slots


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, slots: Slots, places: list[int], tensors: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.slots = slots
        ctx.places = places
        ctx.set_materialize_grads(False)
        # An alias shares the version counter: a stage on this rank whose saved output is
        # modified here still finds out, as in the plain model.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        for place, grad in zip(ctx.places, grads, strict=True):
            if grad is not None:
                ctx.slots.put(place, grad)
        return None, None, None, None


_apply: Any = _Receive.apply
