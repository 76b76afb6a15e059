"""What crosses each stage boundary in one microbatch, in numbers.

A `Boundary` lists, for every edge between two stages, the tensors that travel
(name, shape, dtype, whether a gradient comes back). It is the same on all ranks:
for traced stages it follows from the interfaces and the sizes of the inputs, for
hand-written ones from a run on fake tensors, stage after stage.

Hand-written stages may hand over any pytree. Its tensors travel; the rest (None,
numbers, strings, the structure itself) is agreed on beforehand as a `Skeleton`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import PipeliningShapeError
from fxpipe.graph.interface import StageInterface
from fxpipe.program import Edge, Edges
from fxpipe.runtime.stage.dtensors import Layout
from fxpipe.torch_inside import pytree

__all__ = ["Boundary", "PortShape", "Skeleton", "bind_traced", "skeleton_of"]


@dataclass(frozen=True, slots=True)
class PortShape:
    """One tensor on an edge, with numbers for sizes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    layout: Layout | None = None  # of a DTensor; the shape is that of its local part

    def __str__(self) -> str:
        of = "" if self.layout is None else f" of {self.layout}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{of}"


@dataclass(frozen=True, slots=True)
class Boundary:
    """The ports of every edge, for one shape of microbatch."""

    num_stages: int
    ports: Mapping[tuple[int, int], tuple[PortShape, ...]]

    def edges(self) -> Edges:
        """The stage graph for the program: an edge returns a gradient if a port does."""
        return Edges.of(
            self.num_stages,
            (
                Edge(source, target, any(port.has_gradient for port in ports))
                for (source, target), ports in self.ports.items()
            ),
        )


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The structure of a value: where tensors go, and everything else as it is."""

    treespec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    names: tuple[str, ...]

    def tensors(self, value: Any, stage: int) -> list[torch.Tensor]:
        """The tensors of a value of this structure, after checking the rest."""
        if self.is_bare and type(value) is torch.Tensor:
            return [value]
        leaves, treespec = pytree.tree_flatten(value)
        if treespec != self.treespec:
            raise PipeliningShapeError(
                f"stage {stage} returned the structure {treespec}, agreed was {self.treespec}"
            )
        tensors = []
        for leaf, agreed, is_tensor, name in zip(
            leaves, self.leaves, self.is_tensor, self.names, strict=True
        ):
            if is_tensor != isinstance(leaf, torch.Tensor) or (not is_tensor and leaf != agreed):
                raise PipeliningShapeError(
                    f"stage {stage} returned {_kind(leaf)} at {name}, agreed was "
                    f"{'a tensor' if is_tensor else repr(agreed)}; values that change from one "
                    "microbatch to the next must be tensors"
                )
            if is_tensor:
                tensors.append(leaf)
        return tensors

    @property
    def is_bare(self) -> bool:
        """Whether the value is one tensor and nothing around it."""
        return len(self.is_tensor) == 1 and self.is_tensor[0] and self.treespec.is_leaf()

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A value of this structure with these tensors."""
        if self.is_bare:
            return tensors[0]
        parts = iter(tensors)
        leaves = [
            next(parts) if is_tensor else leaf
            for leaf, is_tensor in zip(self.leaves, self.is_tensor, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.treespec)

    def plain(self) -> tuple[Any, tuple[bool, ...], tuple[str, ...]]:
        """The structure as a value with `...` where tensors go, to be told to other ranks."""
        leaves = [... if flag else x for flag, x in zip(self.is_tensor, self.leaves, strict=True)]
        return pytree.tree_unflatten(leaves, self.treespec), self.is_tensor, self.names

    @classmethod
    def of_plain(cls, value: Any, is_tensor: tuple[bool, ...], names: tuple[str, ...]) -> Skeleton:
        leaves, treespec = pytree.tree_flatten(value)
        kept = (None if flag else x for flag, x in zip(is_tensor, leaves, strict=True))
        return cls(treespec, tuple(kept), is_tensor, names)


def skeleton_of(value: Any) -> Skeleton:
    """The structure of `value` without its tensors."""
    leaves, treespec = pytree.tree_flatten(value)
    is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
    kept = tuple(None if flag else leaf for flag, leaf in zip(is_tensor, leaves, strict=True))
    return Skeleton(treespec, kept, is_tensor, _names(value, len(leaves)))


def _names(value: Any, count: int) -> tuple[str, ...]:
    """What to call the parts of `value`; a class may be registered without names for its own."""
    try:
        paths, _ = pytree.tree_flatten_with_path(value)
    except ValueError:
        return tuple(f"output[{index}]" for index in range(count))
    return tuple(f"output{pytree.keystr(path)}" for path, _ in paths)


def bind_traced(
    interfaces: Sequence[StageInterface],
    symbols: Mapping[str, int],
    trainable: Sequence[bool],
) -> Boundary:
    """The boundary of traced stages, once the sizes of the inputs are known.

    `trainable[s]`: stage s itself has something that wants a gradient (parameters,
    or a model input). A port carries a gradient back if it can and if anything at
    or before its sender wants one.
    """
    wants = list(trainable)
    ports: dict[tuple[int, int], list[PortShape]] = {}
    for interface in interfaces:
        for received in interface.received:
            spec = received.port.spec.bind(symbols)
            shape = tuple(int(size) for size in spec.shape)
            has_gradient = spec.requires_grad and wants[received.source_stage]
            wants[interface.stage] = wants[interface.stage] or has_gradient
            ports.setdefault((received.source_stage, interface.stage), []).append(
                PortShape(received.port.name, shape, spec.dtype, has_gradient)
            )
    return Boundary(len(interfaces), {edge: tuple(found) for edge, found in ports.items()})


def _kind(leaf: object) -> str:
    return "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
