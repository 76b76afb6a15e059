"""Give every stage of this process the inputs it needs, microbatch by microbatch.

Each rank passes what it has: everything (the same call on all ranks), or what its
own stages need. The batch is split once, by the rules of `fxpipe.microbatch`. A
model input that a stage needs but its rank was not given is sent from a rank that
has it.

Inputs that require a gradient are split into fresh leaves, so that no graph
reaches across microbatches, and get their gradient back after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.runtime.stage.stage_kind import ManualFront, Stage, TracedFront
from fxpipe.runtime.wire.control import Control

__all__ = [
    "InputLeaves",
    "check_keywords",
    "leaf_key",
    "manual_keywords",
    "signature",
    "stage_inputs",
    "tensors_of",
]


def leaf_key(leaf: Any) -> Any:
    """What must be equal for two inputs to be handled alike."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        return (type(leaf).__name__, repr(leaf))
    return (type(leaf).__name__, leaf)


def signature(*trees: Any) -> tuple[Any, ...]:
    """A key of structures, shapes, dtypes and plain values, without any data."""
    opened = pytree.tree_map_only(Microbatches, lambda m: list(m._items), trees)
    leaves, treespec = pytree.tree_flatten(opened)
    return (treespec, *map(leaf_key, leaves))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class _Leaf:
    key: tuple[int, str, int]
    chunk: torch.Tensor
    leaf: torch.Tensor


class InputLeaves:
    """The chunks that require a gradient, and the fresh leaves that stand for them."""

    def __init__(self) -> None:
        self._leaves: list[_Leaf] = []

    def detach(self, key: tuple[int, str], tree: Any) -> Any:
        """The same tree with every tensor that requires a gradient replaced by a leaf."""
        counter = iter(range(2**31))

        def one(tensor: torch.Tensor) -> torch.Tensor:
            place = next(counter)
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            self._leaves.append(_Leaf((*key, place), tensor, leaf))
            return leaf

        return pytree.tree_map_only(torch.Tensor, one, tree)

    def add_up(self, names: Sequence[str], control: Control) -> None:
        """Sum the gradients of inputs that several ranks use."""
        chosen = [x for x in self._leaves if x.key[1] in names]
        mine = {x.key: x.leaf.grad.cpu() for x in chosen if x.leaf.grad is not None}
        everywhere = control.gather(mine)
        for x in chosen:
            parts = [found[x.key] for found in everywhere if x.key in found]
            if parts:
                x.leaf.grad = sum(parts[1:], parts[0]).to(x.leaf.device)

    def give_back(self, scale: float | None) -> None:
        """Send the leaves' gradients on into the user's own tensors."""
        pairs = [
            (x.chunk, x.leaf.grad if scale is None else x.leaf.grad * scale)
            for x in self._leaves
            if x.leaf.grad is not None
        ]
        self._leaves = []
        if pairs:
            torch.autograd.backward([c for c, _ in pairs], [g for _, g in pairs])


def stage_inputs(
    stages: Iterable[Stage],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[Mapping[str, Any]],
) -> dict[int, tuple[list[tuple[Any, ...]], list[dict[str, Any]]]]:
    """Per stage: positional and keyword inputs of every microbatch.

    For traced stages `kwargs` holds model inputs by name, for hand-written ones what
    the rank was given.
    """
    found: dict[int, tuple[list[tuple[Any, ...]], list[dict[str, Any]]]] = {}
    for stage in stages:
        if isinstance(stage.front, TracedFront):
            names: Iterable[str] = stage.front.info.interfaces[stage.stage_index].model_inputs
            positional: list[tuple[Any, ...]] = [()] * len(kwargs)
        else:
            accepted = stage.front.accepts(stage.submod)
            names = kwargs[0] if accepted is None else [n for n in kwargs[0] if n in accepted]
            positional = list(args) if stage.is_first else [()] * len(kwargs)
        keyword = [{name: chunk[name] for name in names if name in chunk} for chunk in kwargs]
        found[stage.stage_index] = (positional, keyword)
    return found


def manual_keywords(stages: Iterable[Stage]) -> frozenset[str] | None:
    """Names of keywords that some stage takes; None: one of them takes any."""
    names: set[str] = set()
    for stage in stages:
        assert isinstance(stage.front, ManualFront)
        accepted = stage.front.accepts(stage.submod)
        if accepted is None:
            return None
        names |= accepted
    return frozenset(names)


def check_keywords(given: Iterable[str], accepted: frozenset[str] | None) -> None:
    """Refuse a keyword that no stage takes.

    Raises:
        InputError: naming all such keywords and what is taken.
    """
    if accepted is None:
        return
    unknown = sorted(set(given) - accepted)
    if unknown:
        raise InputError(
            f"no stage takes the keyword input{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))}; taken are {', '.join(sorted(accepted)) or 'none'}"
        )
