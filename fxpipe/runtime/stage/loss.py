"""Turn what a loss function returns into the number to differentiate.

A loss function returns a scalar, or a pair `(sum, weight)`. A scalar is taken for
a mean over its microbatch: the microbatches' losses are averaged, weighted by
their rows. For pairs the loss of the batch is the sum of sums over the sum of
weights, the masked mean that no average of averages can give.

Stages inside the model add their own terms with `aux_loss`. Scaling always
happens on what is differentiated, never on a parameter's stored `.grad`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.torch_inside import pytree

__all__ = ["AuxLosses", "LossTerm", "aux_loss", "collect_aux_losses", "loss_term", "own_leaves"]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One microbatch's loss: `total` to differentiate, over `weight` if it is a sum."""

    total: torch.Tensor
    weight: torch.Tensor | None

    @property
    def reported(self) -> torch.Tensor:
        """The microbatch's own mean, detached; zero where its weight is zero."""
        total = self.total.detach()
        if self.weight is None:
            return total
        return torch.where(self.weight != 0, total / self.weight, torch.zeros_like(total))


def loss_term(
    loss_fn: Callable[..., Any], output: Any, target: Any, loss_kwargs: Mapping[str, Any]
) -> LossTerm:
    """Call the loss function and check what it returns."""
    found = loss_fn(output, target, **loss_kwargs)
    if isinstance(found, tuple | list) and len(found) == 2:
        total, weight = found
        weight = torch.as_tensor(weight).detach()
        if weight.numel() != 1 or weight.is_complex():
            raise InputError(
                f"loss_fn returned a weight of shape {list(weight.shape)} and {weight.dtype}, not "
                "a real number"
            )
        return LossTerm(_scalar(total), weight.reshape(()))
    return LossTerm(_scalar(found), None)


def _scalar(found: Any) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise InputError(
            f"loss_fn must return a scalar tensor or a pair (sum, weight), but returned {got}"
        )
    return found.reshape(())


def own_leaves(total: torch.Tensor, output: Any) -> list[torch.Tensor]:
    """What gets a gradient of the loss, but not through the model's output.

    For example the parameters of a loss that is a module, or a target that requires a gradient.
    """
    seen: set[Any] = {None}
    seen |= {t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)}
    found: dict[int, torch.Tensor] = {}
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions]  # type: ignore[union-attr]
    return list(found.values())


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
