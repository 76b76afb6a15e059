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

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.parameters.tied import Scale, on_device
from fxpipe.runtime.stage.stage_kind import Stage
from fxpipe.torch_inside import pytree

__all__ = [
    "InputLeaves",
    "check_keywords",
    "known_keywords",
    "leaf_key",
    "signature",
    "stage_inputs",
    "tensors_of",
]


def leaf_key(leaf: Any) -> Any:
    """What must be equal for two inputs to be handled alike."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
    if type(leaf) in (float, complex):  # 0.0 == -0.0, and nan is not equal to itself
        return (type(leaf), repr(leaf))
    try:
        hash(leaf)
    except Exception:  # unhashable, or its own __hash__ fails
        return _Unlike(leaf)
    return (type(leaf), leaf)


class _Unlike:
    """Stands for a value that may change without notice: equal to nothing."""

    def __init__(self, value: Any) -> None:
        self.value = value


def signature(*trees: Any) -> tuple[Any, ...]:
    """A key of structures, shapes, dtypes and plain values, without any data."""
    leaves, treespec = pytree.tree_flatten(trees)
    if any(type(leaf) is Microbatches for leaf in leaves):
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

    def give_back(self, scale: Scale) -> None:
        """Send the leaves' gradients on into the user's own tensors."""
        pairs = [
            (x.chunk, x.leaf.grad if scale is None else x.leaf.grad * on_device(scale, x.leaf))
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
    """Per stage: positional and keyword inputs of every microbatch."""
    found: dict[int, tuple[list[tuple[Any, ...]], list[dict[str, Any]]]] = {}
    for stage in stages:
        taken = stage.front.takes(stage) if kwargs[0] else None
        names = [name for name in kwargs[0] if taken is None or name in taken]
        positional = list(args) if stage.is_first else [()] * len(kwargs)
        keyword = [{name: chunk[name] for name in names if name in chunk} for chunk in kwargs]
        found[stage.stage_index] = (positional, keyword)
    return found


def known_keywords(stages: Iterable[Stage], given: Sequence[str]) -> frozenset[str] | None:
    """Names of keywords that a user may pass because of these stages; None: any."""
    names: set[str] = set()
    for stage in stages:
        known = stage.front.known(stage, given)
        if known is None:
            return None
        names |= known
    return frozenset(names)


def check_keywords(given: Iterable[str], known: frozenset[str]) -> None:
    """Refuse a keyword that no stage takes.

    Raises:
        InputError: naming all such keywords and those that can be passed.
    """
    unknown = sorted(set(given) - known)
    if unknown:
        raise InputError(
            f"no stage takes the keyword input{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))}; they take {', '.join(sorted(known)) or 'none'}"
        )
