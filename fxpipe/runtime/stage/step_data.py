"""What one step knows: its targets, its loss, and what it collects on the way.

A loss function returns a scalar, or a pair `(sum, weight)`. A scalar is taken for a mean over its
microbatch: the microbatches' losses are averaged, weighted by their rows. For pairs the loss of the
batch is the sum of sums over the sum of weights, the masked mean that no average of averages can
give. Stages inside the model add their own terms with `aux_loss`. Scaling always happens on what is
differentiated, never on a parameter's stored `.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.parameters.tied import GradStash, Scale
from fxpipe.torch_inside import pytree

__all__ = [
    "LossTerm",
    "StepData",
    "loss_term",
    "own_leaves",
]


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


@dataclass(slots=True)
class StepData:
    """One step on one process. `weights[m]` is the share of microbatch m in the mean."""

    is_training: bool
    weights: Sequence[float]
    loss_fn: Callable[..., Any] | None
    targets: Sequence[Any] | None
    loss_kwargs: Sequence[Mapping[str, Any]]
    keeps_outputs: bool
    wants_loss: bool
    autocast: tuple[str, ...]
    batch_weight: float = 1.0  # that sums are divided by, as far as it is known
    grad_scale: float = 1.0
    """A factor of all gradients; what is reported as loss is without it."""
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, LossTerm] = field(default_factory=dict)
    has_differentiated: bool = False
    aux: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    _asides: list[GradStash] = field(default_factory=list)
    _seeds: dict[tuple[float, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def seed(self, microbatch: int, term: torch.Tensor, *, is_aux: bool) -> torch.Tensor:
        """The factor of a term in the loss of the batch."""
        found = self.losses.get(microbatch)
        if found is not None and found.weight is not None and not is_aux:
            return self._seed(self.grad_scale / self.batch_weight, term)
        return self._seed(self.weights[microbatch] * self.grad_scale, term)

    def put_aside(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Tell what this step adds to these gradients apart from what is there.

        Returns those that are neither known yet nor parameters of this process's stages.
        """
        known = {id(leaf) for aside in self._asides for leaf in aside.leaves}
        if len(known) < len(leaves):  # the stages' own parameters are put aside already
            known |= {id(p) for module in self.modules for p in module.parameters()}
        new = [leaf for leaf in leaves if id(leaf) not in known]
        if new:
            self._asides.append(GradStash(new))
        return new

    def restore(self, scale: Scale) -> None:
        """The step succeeded: add what it has added, times `scale`."""
        for aside in self._asides:
            aside.restore(scale)
        self._asides.clear()

    def undo(self) -> None:
        """Forget what this step has added to gradients that were put aside."""
        for aside in self._asides:
            aside.undo()
        self._asides.clear()

    def _seed(self, factor: float, term: torch.Tensor) -> torch.Tensor:
        key = (factor, term.dtype)
        known = self._seeds.get(key)
        if known is None:
            known = self._seeds[key] = torch.full_like(term, factor, requires_grad=False)
        return known

    def no_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast does not belong around a backward, also when the step runs inside one."""
        if not self.autocast:
            return _NOTHING
        stack = contextlib.ExitStack()
        for device_type in self.autocast:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        return stack


_NOTHING = contextlib.nullcontext()
