"""Decide which leaves of the inputs are cut, and into how many rows each.

In:  `Tree`s: the positional arguments, the keyword arguments, the target, with their specs.
Out: every leaf's `dim` (None: whole to every microbatch) and the `Deal` of rows.

All decisions are made from shapes and specs, never from values or ranks, so every rank
that is called alike decides alike. What is neither surely split nor surely repeated is
collected and refused in one error. The rules are those of `fxpipe.microbatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from fxpipe.chunking.tree import (
    Path,
    Replicate,
    Template,
    TensorChunkSpec,
    build,
    child_specs,
    leaf_spec,
    not_a_spec,
    open_node,
    path_text,
    spec_text,
)
from fxpipe.chunking.values import (
    Deal,
    cut,
    deal_of,
    describe,
    hidden_rows,
    is_value,
    num_dims,
    num_rows,
)
from fxpipe.errors import InputError
from fxpipe.torch_inside import version_of

__all__ = [
    "Batch",
    "Leaf",
    "SharedTensor",
    "Tree",
    "check_chunks",
    "check_unchanged",
    "deal_rows",
    "natural_rows",
    "pieces",
    "read",
    "shared_tensors",
]


@dataclass(slots=True)
class Leaf:
    """One leaf, what was said about it, and what was decided."""

    path: Path
    value: Any
    spec: TensorChunkSpec | Replicate | None
    is_direct: bool  # the spec was written for this leaf, not for something around it
    dim: int | None = None

    @property
    def has_rows(self) -> bool:
        """Whether the default rule may split it."""
        return self.spec is None and is_value(self.value) and num_dims(self.value) > 0


@dataclass(slots=True)
class Tree:
    """One tree of inputs, taken apart."""

    root: str
    spec_name: str
    spec: Any
    template: Template = None
    leaves: list[Leaf] = field(default_factory=list)
    lists: list[tuple[Path, int]] = field(default_factory=list)  # of plain values: maybe per row

    def text(self, path: Path) -> str:
        return path_text(self.root, path)

    def line(self, leaf: Leaf) -> str:
        return f"{self.text(leaf.path)}: {describe(leaf.value)}"


class SharedTensor(NamedTuple):
    """A tensor that several microbatches see, and its version when it was given to them."""

    tree: Tree
    leaf: Leaf
    version: int


class Batch(NamedTuple):
    """A batch size, and the text that says where it was found."""

    rows: int
    where: Callable[[], str]


def read(trees: Sequence[tuple[str, str, Any, Any]]) -> list[Tree]:
    """Take trees of inputs apart, each given as root name, spec name, value and spec.

    Raises:
        InputError: specs that do not fit the values; all of them are named.
    """
    faults: list[str] = []
    result = []
    for root, spec_name, value, spec in trees:
        tree = Tree(root, spec_name, spec)
        tree.template = _read(tree, value, spec, (), faults, is_direct=True)
        for leaf in tree.leaves:
            _resolve(tree, leaf, faults)
        result.append(tree)
    if faults:
        raise InputError("the chunk specs do not fit the inputs:" + _lines(faults))
    return result


def check_chunks(chunks: int) -> None:
    """Refuse a number of microbatches that is not a positive int.

    Raises:
        InputError: it is not.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise InputError(f"the number of microbatches must be a positive int, got {chunks!r}")


def natural_rows(trees: Sequence[Tree]) -> Batch | None:
    """The batch size; None if nothing carries rows.

    A spec decides, else the positional arguments, else the keyword arguments, else the
    target. Among several, the first that does not just broadcast.
    """
    inputs = [tree for tree in trees if tree.root != "target"]
    targets = [tree for tree in trees if tree.root == "target"]
    for group in (inputs, targets):
        for tree in group:
            for leaf in tree.leaves:
                if leaf.dim is not None:
                    return Batch(num_rows(leaf.value, leaf.dim), partial(tree.line, leaf))
        for tree in group:
            leaves = [leaf for leaf in tree.leaves if leaf.has_rows]
            if leaves:
                # Sizes 0 and 1 only count where there is nothing larger.
                sizes = [num_rows(leaf.value) for leaf in leaves]
                size = next((size for size in sizes if size > 1), max(sizes))
                return Batch(size, partial(tree.line, leaves[sizes.index(size)]))
    return None


def deal_rows(trees: Sequence[Tree], chunks: int, rows: Sequence[int] | None = None) -> Deal | None:
    """Decide the `dim` of every leaf; the rows of every microbatch, None if there are none.

    `rows` fixes the rows of every microbatch, and with them the batch size.

    Raises:
        InputError: sizes that contradict each other, inputs that cannot be told, too few rows.
    """
    batch = natural_rows(trees)
    if rows is not None:
        batch = Batch(sum(rows), lambda: f"microbatches of {_numbers(rows)} rows")
    if chunks == 1:
        return Deal((batch.rows,), (batch.rows,)) if batch else None
    if batch is None:
        _decide(trees, None, chunks)
        return None
    _check_said(trees, batch, chunks)
    _decide(trees, batch, chunks)
    if batch.rows < chunks:
        raise InputError(
            f"a batch of {batch.rows} rows cannot be split into {chunks} microbatches "
            f"({batch.where()}): give at least {chunks} rows, or use at most "
            f"{max(batch.rows, 1)} microbatches"
        )
    return _deal(trees, batch, chunks, rows)


def pieces(tree: Tree, deal: Deal | None, chunks: int) -> list[Any]:
    """The tree of every microbatch."""
    columns = [
        [leaf.value] * chunks
        if leaf.dim is None or deal is None
        else cut(leaf.value, leaf.dim, _rows_of(leaf.value, leaf.dim, deal, chunks))
        for leaf in tree.leaves
    ]
    return list(build(tree.template, iter(columns), chunks))


def _rows_of(value: Any, dim: int, deal: Deal, chunks: int) -> Sequence[int]:
    """The rows of each piece: the batch's, or its own if it was said to be split along others."""
    is_batch = num_rows(value, dim) == sum(deal.rows)
    return deal.rows if is_batch else deal_of(value, dim, chunks).rows


def shared_tensors(trees: Sequence[Tree], chunks: int) -> tuple[SharedTensor, ...]:
    """The tensors that several microbatches are going to see."""
    return tuple(
        SharedTensor(tree, leaf, version_of(leaf.value))
        for tree in trees
        for leaf in tree.leaves
        if chunks > 1
        and leaf.dim is None
        and isinstance(leaf.value, torch.Tensor)
        and not leaf.value.is_inference()
    )


def check_unchanged(shared: Sequence[SharedTensor]) -> None:
    """Refuse a step whose model changed one of these in place: other microbatches saw it.

    Raises:
        InputError: names every tensor that was changed.
    """
    changed = [one for one in shared if version_of(one.leaf.value) != one.version]
    if changed:
        raise InputError(
            "the model changes inputs in place that go whole to every microbatch, so later "
            "microbatches saw them changed, and the step is wrong:"
            + _lines([one.tree.line(one.leaf) for one in changed])
            + "\nlet the model work on a copy (x = x.clone()), or pass Microbatches([...]) in "
            "which every microbatch has its own"
        )


# ---------------------------------------------------------------------------- reading


def _read(
    tree: Tree, value: Any, spec: Any, path: Path, faults: list[str], *, is_direct: bool
) -> Template:
    said = leaf_spec(spec)
    node = open_node(value)
    if node is None:
        if spec is not None and said is None:
            faults.append(not_a_spec(spec, path_text(tree.spec_name, path)))
        tree.leaves.append(Leaf(path, value, said, is_direct))
        return None
    first = len(tree.leaves)
    specs = child_specs(
        spec,
        node,
        said=path_text(tree.spec_name, path),
        of=tree.text(path),
        faults=faults,
    )
    templates = [
        _read(tree, child, child_spec, (*path, (node, index)), faults, is_direct=said is None)
        for index, (child, child_spec) in enumerate(zip(node.children, specs, strict=True))
    ]
    if isinstance(value, list) and _is_plain(tree.leaves[first:]):
        tree.lists.append((path, len(value)))
    return node, templates


def _is_plain(leaves: list[Leaf]) -> bool:
    return any(leaf.value is not None for leaf in leaves) and all(
        leaf.spec is None and isinstance(leaf.value, int | float | str | None) for leaf in leaves
    )


def _resolve(tree: Tree, leaf: Leaf, faults: list[str]) -> None:
    if leaf.spec is None or isinstance(leaf.spec, Replicate):
        return
    if not isinstance(leaf.spec, TensorChunkSpec):
        faults.append(f"{tree.line(leaf)}: {leaf.spec!r} merges outputs, it cannot split an input")
    elif not is_value(leaf.value):
        if leaf.is_direct and leaf.value is not None:
            faults.append(f"{tree.line(leaf)} cannot be split by {leaf.spec!r}: write Replicate()")
    elif isinstance(leaf.value, BlockMask):
        if leaf.spec.split_dim != 0:
            faults.append(f"{tree.line(leaf)} can only be split by TensorChunkSpec(0)")
        elif num_dims(leaf.value) and num_rows(leaf.value) > 1:  # 1: the same for all rows
            leaf.dim = 0
    else:
        dims = num_dims(leaf.value)
        if not -dims <= leaf.spec.split_dim < dims:
            only = f"only 0 to {dims - 1}" if dims > 1 else "only 0" if dims else "none at all"
            faults.append(
                f"{tree.line(leaf)} has no dimension {leaf.spec.split_dim} ({leaf.spec!r}), {only}"
            )
        else:
            leaf.dim = leaf.spec.split_dim % dims


# --------------------------------------------------------------------------- deciding


def _check_said(trees: Sequence[Tree], batch: Batch, chunks: int) -> None:
    """Refuse tensors with a spec that have too few rows, and targets without the batch's rows."""
    for tree in trees:
        for leaf in tree.leaves:
            if leaf.dim is None:
                continue
            size = num_rows(leaf.value, leaf.dim)
            if size < chunks or (tree.root == "target" and size != batch.rows):
                raise InputError(
                    f"{tree.line(leaf)}, {leaf.spec!r}: {size} rows cannot be split into "
                    f"{chunks} microbatches along with the batch of {batch.rows} rows "
                    f"({batch.where()})"
                )


def _decide(trees: Sequence[Tree], batch: Batch | None, chunks: int) -> None:
    rows = batch.rows if batch else None
    refused: list[tuple[Tree, Path, str]] = []
    for tree in trees:
        for leaf in tree.leaves:
            if leaf.has_rows:
                size = num_rows(leaf.value)
                if size == rows or (tree.root == "kwargs" and size == chunks):
                    leaf.dim = 0
                elif tree.root == "target" or not (size == 1 or _is_empty(leaf.value)):
                    refused.append((tree, leaf.path, f"{tree.line(leaf)} has {size} rows"))
            elif not is_value(leaf.value) and not isinstance(leaf.spec, Replicate):
                hidden = hidden_rows(leaf.value)
                if hidden:
                    reason = f"{tree.line(leaf)} holds {hidden}, but is not a tree of tensors"
                    refused.append((tree, leaf.path, reason))
        for path, length in tree.lists:
            if length == rows and length > 1:
                reason = f"{tree.text(path)}: a list of {length} plain values, maybe one per row"
                refused.append((tree, path, reason))
    if refused:
        _refuse(refused, batch)


def _refuse(refused: list[tuple[Tree, Path, str]], batch: Batch | None) -> None:
    whole = f"the batch of {batch.rows} rows ({batch.where()})" if batch else "the inputs"
    specs = []
    for tree in {id(tree): tree for tree, _, _ in refused}.values():
        paths = [path for owner, path, _ in refused if owner is tree]
        specs.append(f"{tree.spec_name}={spec_text(paths, tree.spec, 'Replicate()')}")
    raise InputError(
        f"cannot tell how to split these along with {whole}:"
        + _lines([reason for _, _, reason in refused])
        + "\nif every microbatch may have the whole of it, write"
        + _lines(specs)
        + "\nif it carries the batch in another dimension, write TensorChunkSpec(dim) there; if it "
        "describes how the rows are packed, pass Microbatches([...]) that are split already"
    )


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def _deal(
    trees: Sequence[Tree], batch: Batch, chunks: int, rows: Sequence[int] | None
) -> Deal | None:
    dealt: list[tuple[str, Deal]] = []
    for tree in trees:
        for leaf in tree.leaves:
            if leaf.dim is not None and num_rows(leaf.value, leaf.dim) == batch.rows:
                try:
                    dealt.append((tree.line(leaf), deal_of(leaf.value, leaf.dim, chunks)))
                except InputError as error:
                    raise InputError(f"{tree.line(leaf)}: {error}") from None
    if not dealt:
        return None if rows is None else Deal(tuple(rows), (sum(rows),))
    shards = dealt[0][1].shards
    if any(deal.shards != shards for _, deal in dealt):
        lines = [f"{line}, shards of {_numbers(deal.shards)} rows" for line, deal in dealt]
        raise InputError(
            "DTensors that are sharded along the batch are split shard by shard, so all inputs "
            "that are split must be sharded alike:" + _lines(lines)
        )
    if rows is None:
        if 0 in dealt[0][1].rows:
            raise InputError(
                f"{sum(shards)} rows in shards of {_numbers(shards)} ({dealt[0][0]}) cannot be "
                f"split into {chunks} microbatches: the largest shard has {max(shards)} rows"
            )
        return dealt[0][1]
    if len(shards) > 1 and dealt[0][1].rows != tuple(rows):
        raise InputError(
            f"{dealt[0][0]} is sharded along the batch and is split into "
            f"{_numbers(dealt[0][1].rows)} rows, not into {_numbers(rows)}"
        )
    return Deal(tuple(rows), shards)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)
