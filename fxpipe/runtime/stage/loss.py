"""Turn what a loss function returns into the number to differentiate.

A loss function returns a scalar, or a pair `(sum, weight)`. A scalar is taken for
a mean over its microbatch: the microbatches' losses are averaged, weighted by
their rows. For pairs the loss of the batch is the sum of sums over the sum of
weights, the masked mean that no average of averages can give.

Stages inside the model add their own terms with `aux_loss`. Scaling always
happens on what is differentiated, never on a parameter's stored `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.torch_inside import pytree

__all__ = ["LossTerm", "loss_term", "own_leaves"]


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
        weight = torch.as_tensor(weight)
        if weight.requires_grad:
            raise InputError(
                "loss_fn returned a weight that requires a gradient: the loss is the sum over the "
                "weight, and only the sum is differentiated; detach it, or return the loss itself"
            )
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
    if found.is_complex():
        raise InputError(f"loss_fn must return a real number, but returned {found.dtype}")
    return found if found.dim() == 0 else found.reshape(())


def own_leaves(total: torch.Tensor, output: Any) -> list[torch.Tensor]:
    """What gets a gradient of the loss, but not through the model's output.

    For example the parameters of a loss that is a module, or a target that requires a gradient.
    """
    outputs = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    seen: set[Any] = {t.grad_fn for t in outputs if isinstance(t, torch.Tensor)}
    seen.add(None)
    found: dict[int, torch.Tensor] = {}
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = node.next_functions  # type: ignore[union-attr]
        waiting += [other for other, _ in following]
        leaf = None if following else getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
    return list(found.values())
