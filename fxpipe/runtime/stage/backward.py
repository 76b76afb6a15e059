"""Receive activations and run backwards: whole, or as input half and weight half.

In:  tensors from other stages; a stage's outputs and the gradients that came back.
Out: values a module may use as if it had made them; their gradients in `Slots`;
     gradients of the parameters in `.grad`, through autograd.

    values, slots = receive(buffers, wants)     values, slots = receive(buffers, wants)
    output = module(*values)                    with deferral: output = module(*values)
    backward_full([output], [grad])             backward_input([output], [grad], deferral)
    slots.take(i) -> to the sender              slots.take(i) -> to the sender
                                                backward_weight(deferral), at any later time

None among the gradients means that nothing came back for this output. It is left out, as
autograd leaves out a value that does not reach the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fxpipe.runtime.stage.deferral import Deferral, can_defer
from fxpipe.runtime.stage.engine import run_backward

__all__ = [
    "Deferral",
    "Slots",
    "backward_full",
    "backward_input",
    "backward_weight",
    "can_defer",
    "receive",
]

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


def backward_full(
    outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None] | None = None
) -> None:
    """Run the whole backward. Without `grads` the outputs are scalars, such as losses."""
    roots, seeds = _roots(outputs, grads)
    if roots and seeds is not None:
        run_backward(roots, seeds)
    elif roots:
        torch.autograd.backward(roots)  # type: ignore[arg-type]


def backward_input(
    outputs: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor | None] | None,
    deferral: Deferral,
) -> None:
    """Run the backward up to the inputs; `deferral` is the one the forward ran in."""
    roots, seeds = _roots(outputs, grads)
    if roots:
        deferral.backward(roots, seeds)


def backward_weight(deferral: Deferral) -> None:
    """Add the weight gradients that `backward_input` left undone."""
    deferral.run()


def _roots(
    outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None] | None
) -> tuple[list[Tensor | GradientEdge], list[Tensor] | None]:
    if grads is None:
        return [output for output in outputs if _can_grow(output)], None
    roots: list[Tensor | GradientEdge] = []
    seeds: list[Tensor] = []
    for output, grad in zip(outputs, grads, strict=True):
        if grad is not None and _can_grow(output):
            roots.append(output)
            seeds.append(grad)
    return roots, seeds


def _can_grow(output: Tensor | GradientEdge) -> bool:
    return isinstance(output, GradientEdge) or output.requires_grad
