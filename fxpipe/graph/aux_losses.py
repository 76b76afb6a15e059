"""Terms of the loss that a model adds from inside, with `aux_loss`.

While a model is captured, a term in opened code is written down like any other operation; a leaf
adds its own when it runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from fxpipe.errors import InputError

__all__ = ["AuxLosses", "aux_loss", "collect_aux_losses"]


@dataclass(slots=True)
class AuxLosses:
    """The auxiliary terms of one forward."""

    terms: list[torch.Tensor] = field(default_factory=list)

    def total(self) -> torch.Tensor | float:
        """Their sum, to be added to a plain model's loss."""
        return sum(self.terms[1:], self.terms[0]) if self.terms else 0.0


_COLLECTOR: contextvars.ContextVar[AuxLosses | None] = contextvars.ContextVar(
    "fxpipe_aux_losses", default=None
)


def aux_loss(value: torch.Tensor, weight: float = 1.0) -> None:
    """Add `weight * value` to the loss from inside a model, for example to balance experts.

    In a pipeline the term is differentiated on its own stage, with the weight of its
    microbatch. Around a plain model, collect the terms yourself:

        with collect_aux_losses() as aux:
            output = model(x)
        loss = loss_fn(output, target) + aux.total()

    Anywhere else the call does nothing.
    """
    if has_torch_function_unary(value):  # somebody writes down what the model does
        handle_torch_function(aux_loss, (value,), value, weight)
        return
    collector = _COLLECTOR.get()
    if collector is not None:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise InputError("aux_loss takes a scalar tensor")
        collector.terms.append(value.reshape(()) * weight)


@contextlib.contextmanager
def collect_aux_losses() -> Iterator[AuxLosses]:
    """Gather what `aux_loss` is given inside the block."""
    aux = AuxLosses()
    token = _COLLECTOR.set(aux)
    try:
        yield aux
    finally:
        _COLLECTOR.reset(token)
