"""Splitting and merging again gives back what was split, for trees of any shape."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from fxpipe.microbatch import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    split_batch,
)

BATCH = 6


class Two(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any


_pytree.register_dataclass(Record)


@dataclasses.dataclass(frozen=True)
class Said:
    """A leaf together with the spec that is written for it."""

    value: Any
    spec: Any


def tensor(shape: list[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + len(shape)


@st.composite
def said_to_be_split(draw: st.DrawFn, smallest: int = 0) -> Said:
    shape = draw(st.lists(st.integers(smallest, 7), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = BATCH
    return Said(tensor(shape), TensorChunkSpec(dim))


@st.composite
def split_by_default(draw: st.DrawFn) -> Said:
    return Said(tensor([BATCH, *draw(st.lists(st.integers(1, 3), max_size=2))]), None)


def repeated() -> st.SearchStrategy[Said]:
    values = st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.integers(1, 3), max_size=2).map(lambda shape: tensor([1, *shape])),
        st.just(torch.tensor(2.5)),
    )
    tables = st.lists(st.integers(1, 7), max_size=3).map(tensor)
    return st.builds(Said, values, st.none()) | st.builds(Said, tables, st.just(Replicate()))


def trees(leaves: st.SearchStrategy[Said]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
            st.builds(Two, inner, inner),
            st.builds(Record, inner, inner),
        ),
        max_leaves=6,
    )


LEAVES = trees(said_to_be_split() | split_by_default() | repeated())
SAID = said_to_be_split()


def values(tree: Any) -> Any:
    return _pytree.tree_map(lambda said: said.value, tree, is_leaf=is_said)


def specs(tree: Any) -> Any:
    return _pytree.tree_map(lambda said: said.spec, tree, is_leaf=is_said)


def merge_specs(tree: Any) -> Any:
    """How the chunks of a tree are merged: split ones as they were split, the rest by agreement."""

    def spec(said: Said) -> Any:
        rows = isinstance(said.value, torch.Tensor) and said.value.shape[:1] == (BATCH,)
        return said.spec or (TensorChunkSpec(0) if rows else Replicate())

    return _pytree.tree_map(spec, tree, is_leaf=is_said)


def is_said(leaf: Any) -> bool:
    return isinstance(leaf, Said)


def check_equal(got: Any, want: Any) -> None:
    got_leaves, got_structure = _pytree.tree_flatten(got)
    want_leaves, want_structure = _pytree.tree_flatten(want)
    assert got_structure == want_structure
    for one, other in zip(got_leaves, want_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one is other or one == other


@settings(max_examples=150, deadline=None)
@given(anchor=SAID, tree=LEAVES, chunks=st.integers(1, BATCH))
def test_merging_what_was_split_gives_it_back(anchor, tree, chunks):
    args, kwargs = (anchor, tree), {"tree": tree}

    parts = split_args_kwargs_into_chunks(
        values(args), values(kwargs), chunks, specs(args), specs(kwargs)
    )
    merged = [
        merge_chunks(chunk, merge_specs(tree))
        for chunk, tree in zip(parts, (args, kwargs), strict=True)
    ]

    assert [len(part) for part in parts] == [chunks, chunks]
    check_equal(merged, [values(args), values(kwargs)])


@settings(max_examples=80, deadline=None)
@given(tree=trees(split_by_default()), rows=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_default_rules_of_split_and_merge_are_inverse(tree, rows):
    batch = sum(rows)
    anchor = torch.arange(batch * 2.0).view(batch, 2)
    whole = _pytree.tree_map(
        lambda said: said.value[:1].repeat(batch, *[1] * (said.value.dim() - 1)),
        tree,
        is_leaf=is_said,
    )

    split = split_batch((anchor, whole), {}, len(rows), target=anchor)

    merged = merge_chunks(split.args, None, rows=split.rows)
    check_equal(merged, (anchor, whole))
    check_equal(merge_chunks(split.target, None, rows=split.rows), anchor)
    assert max(split.rows) - min(split.rows) <= 1


@settings(max_examples=60, deadline=None)
@given(tree=trees(said_to_be_split(smallest=1)), chunks=st.integers(1, BATCH))
def test_gradients_reach_every_row_once(tree, chunks):
    leaves = [leaf for leaf in _pytree.tree_leaves(values(tree)) if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        leaf.requires_grad_()

    parts, _ = split_args_kwargs_into_chunks((values(tree),), {}, chunks, (specs(tree),))
    for part in _pytree.tree_leaves(parts):
        part.sum().backward()

    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves)
