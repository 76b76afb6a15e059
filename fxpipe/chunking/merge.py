"""Make one output out of the output of every microbatch.

In:  one tree per microbatch, all of the same structure, and optionally specs.
Out: the tree the plain model would have returned for the whole batch.

Children are matched by name, not by order. Without a spec,

- a tensor with rows is concatenated along dimension 0. If the caller knows the `rows` of
  the microbatches, the size there must be those rows, or the same multiple of them in
  every microbatch (rows flattened with something else, `logits.view(-1, vocab)`); a
  tensor of other sizes carries no batch, so all microbatches must agree on it;
- a 0-dimensional floating point tensor is taken to be a mean over the rows, as a scalar
  from a loss function is: the result is the mean weighted by rows, again 0-dimensional,
  as `ModelOutput.loss` must be. For a sum write `sum_reducer`;
- key-value caches of Hugging Face models that grow are opened: keys and values are such tensors;
- everything else (None, numbers, strings, integer scalars) must be equal in all
  microbatches and is returned as it is.

What does not fit is refused by path, all faults in one error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from fxpipe.chunking.tree import (
    CustomReducer,
    Node,
    Path,
    Replicate,
    Template,
    TensorChunkSpec,
    build,
    child_specs,
    leaf_spec,
    not_a_spec,
    open_cache,
    open_node,
    path_text,
    spec_text,
)
from fxpipe.chunking.values import describe, is_dtensor, join
from fxpipe.errors import InputError

__all__ = ["merge_chunks"]


def merge_chunks(
    chunks: Sequence[Any], chunk_spec: Any = None, *, rows: Sequence[int] | None = None
) -> Any:
    """The output of the whole batch, given the output of every microbatch.

    Three microbatches `{"y": float32[2, 3], "loss": float32[], "n": 7}` become
    `{"y": float32[6, 3], "loss": float32[], "n": 7}`.

    `chunk_spec` is a tree of `TensorChunkSpec` (concatenate along a dimension),
    `Replicate` (all must be equal), `CustomReducer`, and None (the default rule); it may
    stop early. `rows` are the rows of every microbatch, if known.

    Raises:
        InputError: structures that differ, values that cannot be merged, a wrong spec.
    """
    values = list(chunks)
    if not values:
        raise InputError("there is nothing to merge: no microbatch gave an output")
    if rows is not None and len(rows) != len(values):
        raise InputError(f"{len(values)} outputs cannot come from {len(rows)} microbatches")
    merger = _Merger(rows, chunk_spec)
    template = merger.align(values, chunk_spec, (), is_direct=True)
    merger.check()
    merged = [merger.merge(group) for group in merger.groups]
    merger.check()
    return build(template, iter([[leaf] for leaf in merged]), 1)[0]


@dataclass(slots=True)
class _Group:
    """The same leaf of every microbatch."""

    path: Path
    values: list[Any]
    spec: Any
    is_direct: bool

    @property
    def all_values(self) -> bool:
        return all(isinstance(value, torch.Tensor) for value in self.values)


class _Merger:
    def __init__(self, rows: Sequence[int] | None, spec: Any) -> None:
        self.rows = rows
        self.spec = spec
        self.groups: list[_Group] = []
        self.faults: list[str] = []
        self.unclear: list[Path] = []  # a spec would help

    def fault(self, path: Path, text: str, *, is_unclear: bool = False) -> None:
        self.faults.append(f"{path_text('output', path)}: {text}")
        if is_unclear:
            self.unclear.append(path)

    def check(self) -> None:
        if not self.faults:
            return
        lines = "".join(f"\n  {fault}" for fault in self.faults)
        advice = ""
        if self.unclear:
            specs = spec_text(self.unclear, self.spec, "...")
            advice = (
                f"\nsay how in the merge spec (a schedule's output_merge_spec), {specs}: "
                "TensorChunkSpec(dim) concatenates, sum_reducer adds, Replicate() takes one if "
                "all are equal, CustomReducer(init_value, reduce_fn) does anything else"
            )
        raise InputError(f"cannot merge the outputs of the microbatches:{lines}{advice}")

    # ------------------------------------------------------------------- structure

    def align(self, values: list[Any], spec: Any, path: Path, *, is_direct: bool) -> Template:
        """Take all trees apart together, matching children by their keys."""
        opens = spec is None  # a reducer may be meant for a cache as a whole
        nodes = [(open_cache(value) if opens else None) or open_node(value) for value in values]
        first = nodes[0]
        for index, node in enumerate(nodes):
            if not _same_structure(values[0], first, values[index], node):
                self.fault(path, _different(values, index))
                return None
        said = leaf_spec(spec)
        if first is None:
            if spec is not None and said is None:
                self.faults.append(not_a_spec(spec, path_text("the merge spec", path)))
            self.groups.append(_Group(path, values, said, is_direct))
            return None
        names = {"said": path_text("the merge spec", path), "of": path_text("output", path)}
        specs = child_specs(spec, first, **names, faults=self.faults)
        by_key = [
            dict(zip(node.keys, node.children, strict=True)) for node in nodes if node is not None
        ]
        templates = []
        for index, (key, child) in enumerate(zip(first.keys, specs, strict=True)):
            column = [children[key] for children in by_key]
            below = (*path, (first, index))
            templates.append(self.align(column, child, below, is_direct=said is None))
        return first, templates

    # ---------------------------------------------------------------------- values

    def merge(self, group: _Group) -> Any:
        spec, values = group.spec, group.values
        if isinstance(spec, CustomReducer) and self.is_reduced(group):
            return functools.reduce(spec.reduce_fn, values, spec.init_value)
        if isinstance(spec, Replicate) or not isinstance(values[0], torch.Tensor):
            return self.agree(group)
        if not group.all_values:
            odd = next(i for i, v in enumerate(values) if not isinstance(v, torch.Tensor))
            self.fault(group.path, _different(values, odd))
            return None
        if isinstance(spec, TensorChunkSpec):
            return self.concatenate(group, spec.split_dim)
        return self.by_default(group)

    def is_reduced(self, group: _Group) -> bool:
        # A reducer above this leaf is meant for numbers, not for what stands beside them.
        is_number = all(isinstance(v, torch.Tensor | int | float | complex) for v in group.values)
        return is_number or (group.is_direct and group.values[0] is not None)

    def by_default(self, group: _Group) -> Any:
        values = group.values
        if all(value.dim() == 0 for value in values):
            is_mean = all(value.is_floating_point() or value.is_complex() for value in values)
            return self.average(group) if is_mean else self.agree(group)
        if self.rows is not None and not _fits(values, self.rows):
            return self.agree(group)
        return self.concatenate(group, 0)

    def agree(self, group: _Group) -> Any:
        first = group.values[0]
        for index, value in enumerate(group.values):
            if not _equal(first, value):
                text = _different(group.values, index)
                if isinstance(first, torch.Tensor) and first.dim() > 0 and self.rows is not None:
                    text += f"; microbatches of {', '.join(map(str, self.rows))} rows"
                self.fault(group.path, text, is_unclear=not isinstance(group.spec, Replicate))
                return None
        return first

    def concatenate(self, group: _Group, dim: int) -> Any:
        values = group.values
        dims = values[0].dim()
        if not -dims <= dim < dims:
            self.fault(group.path, f"{describe(values[0])} has no dimension {dim}")
            return None
        dim %= dims
        if any(value.is_nested for value in values):
            self.fault(group.path, "nested tensors cannot be concatenated", is_unclear=True)
            return None
        form = _form(values[0], dim)
        for index, value in enumerate(values):
            if _form(value, dim) != form:
                text = f"{_different(values, index)}; these do not fit along dimension {dim}"
                self.fault(group.path, text, is_unclear=True)
                return None
        try:
            return join(values, dim)
        except InputError as error:
            self.fault(group.path, str(error))
            return None

    def average(self, group: _Group) -> Any:
        weights = self.weights()
        if weights is None:
            text = "0-dimensional, and the rows to weight it by differ between the other outputs"
            self.fault(group.path, text, is_unclear=True)
            return None
        scalars = torch.stack(group.values)
        wide = scalars.to(torch.promote_types(scalars.dtype, torch.float32))
        factors = torch.tensor(weights, dtype=wide.dtype, device=wide.device)
        mean = (wide * factors).sum().to(scalars.dtype)
        # A constant stays what it is, to the last bit; without waiting for the device.
        return torch.where((scalars == scalars[0]).all(), scalars[0], mean)

    def weights(self) -> list[float] | None:
        """The share of every microbatch; from the rows of the other outputs if need be."""
        count = len(self.groups[0].values)
        sizes = (
            [self.rows] if self.rows is not None else list(filter(None, map(_sizes, self.groups)))
        )
        shares = {
            tuple(Fraction(size, max(sum(one), 1)) for size in one)
            for one in sizes or [[1] * count]
        }
        return [float(share) for share in shares.pop()] if len(shares) == 1 else None


def _sizes(group: _Group) -> list[int] | None:
    """The rows of each microbatch in this leaf; None if it will not be concatenated."""
    dim = group.spec.split_dim if isinstance(group.spec, TensorChunkSpec) else 0
    can_cut = isinstance(group.spec, TensorChunkSpec | None) and group.all_values
    if not can_cut or not all(-v.dim() <= dim < v.dim() for v in group.values):
        return None
    return [int(value.size(dim)) for value in group.values]


def _same_structure(one: Any, node: Node | None, other: Any, other_node: Node | None) -> bool:
    if node is None or other_node is None:
        return node is other_node
    return type(one) is type(other) and set(node.keys) == set(other_node.keys)


def _fits(values: list[Any], rows: Sequence[int]) -> bool:
    """Whether the sizes of dimension 0 are the rows of the microbatches, or one multiple of all."""
    if not all(value.dim() for value in values):
        return False
    sizes = [int(value.size(0)) for value in values]
    factor, rest = divmod(sizes[0], rows[0]) if rows[0] else (1, 0)
    return rest == 0 and factor > 0 and sizes == [factor * size for size in rows]


def _form(value: Any, dim: int) -> Any:
    shape = value.shape
    kind = (type(value), value.dtype, value.device, value.layout)
    return kind, len(shape), shape[:dim], shape[dim + 1 :]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_dtensor(one):
        return one.placements == other.placements and _equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and torch.equal(one, other)
    try:
        return bool(one == other or (one != one and other != other))  # nan
    except (TypeError, ValueError, RuntimeError):
        return _equal_array(one, other)


def _equal_array(one: Any, other: Any) -> bool:
    try:
        return bool((one == other).all())
    except (AttributeError, TypeError, ValueError):
        return False


def _different(values: list[Any], index: int) -> str:
    first, other = _describe_tree(values[0]), _describe_tree(values[index])
    if first == other:
        return f"microbatches 0 and {index} gave different values ({first})"
    return f"microbatch 0 gave {first}, microbatch {index} gave {other}"


def _describe_tree(value: Any) -> str:
    """A leaf, or a container with the names in it."""
    node = open_node(value)
    if node is None:
        return describe(value)
    names = ", ".join(map(repr, node.keys)) or "nothing"
    inside = f"of {len(node.keys)}" if node.style == "index" else f"with {names}"
    return f"a {type(value).__name__} {inside}"
