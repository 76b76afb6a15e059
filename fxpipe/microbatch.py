"""Split the inputs of a step into microbatches, and merge the outputs again.

In:  the arguments a plain model would get (any tree of tensors), and optionally specs.
Out: `args` and `kwargs` of every microbatch; and back, one output out of one of each.

Nothing is sliced on a guess. Without a spec,

- a tensor with the batch size in dimension 0 is split there, without a copy, into parts
  that differ by one row at most: 10 rows in 4 microbatches are 3, 3, 2 and 2 rows;
- a tensor with size 1 there (it broadcasts over the rows), an empty or 0-dimensional
  tensor, None, a number, or another object without tensors goes whole to every microbatch
  (nothing is copied: all microbatches see the same one);
- a keyword tensor with as many rows as there are microbatches is split into one row each;
- what has rows, but not those of the batch (`cu_seqlens`, a lookup table, a causal mask of
  length x length, a list with a number for every row), is refused: the `InputError` names
  it and the spec to write, since only the user knows whether it may be repeated.

The batch size is that of the positional tensors, else of the keyword tensors, unless a
`TensorChunkSpec` fixes it. Tensors with a `TensorChunkSpec` are split along their own rows, also
if these differ in number. With one microbatch nothing is split and nothing refused.

What a reader would get wrong: a tensor that does not carry the batch, but by accident has
its size in dimension 0, is split like the others. Where that can happen, write
`Replicate()`. Lists and tuples are structure: a list of images is not a batch of images.

How outputs are merged without a spec is told in `fxpipe.chunking.merge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from fxpipe.chunking.merge import merge_chunks
from fxpipe.chunking.split import (
    SharedTensor,
    check_chunks,
    check_unchanged,
    deal_rows,
    natural_rows,
    pieces,
    read,
    shared_tensors,
)
from fxpipe.chunking.tree import (
    CustomReducer,
    LossReducer,
    Replicate,
    TensorChunkSpec,
    sum_reducer,
)
from fxpipe.errors import InputError

__all__ = [
    "CustomReducer",
    "LossReducer",
    "Microbatches",
    "Replicate",
    "Split",
    "TensorChunkSpec",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "split_batch",
    "split_target",
    "sum_reducer",
]

# The names that users of torch.distributed.pipelining import.
_Replicate = Replicate
_CustomReducer = CustomReducer
_LossReducer = LossReducer


@dataclass(frozen=True, slots=True)
class Split:
    """The inputs of one step, one entry per microbatch.

    `target` is None if there was none. `rows` are the rows of every microbatch, by which a
    mean over a microbatch counts in the mean over the batch; None if nothing carries rows.
    `shared` are the tensors that go whole to every microbatch.
    """

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    target: list[Any] | None
    rows: tuple[int, ...] | None
    shared: tuple[SharedTensor, ...] = ()

    def check_unchanged(self) -> None:
        """Call it after the step: was a tensor that all microbatches share left as it was?

        Raises:
            InputError: the model changed one in place; the message names it.
        """
        check_unchanged(self.shared)


class Microbatches:
    """Inputs (or a target) that are split already: `schedule.step(Microbatches(list))`.

    For inputs every item is the call of one microbatch:

        tensor                one positional argument
        tuple                 the positional arguments
        mapping               the keyword arguments
        (tuple, mapping)      both

    To pass a tuple or a mapping as an argument, write it inside such a pair:
    `((argument,), {})`. For a target, every item is the target of one microbatch, as it is.

    A list or tuple must have as many items as the schedule has microbatches, and can be
    used in many steps. Of anything else that can be iterated (a DataLoader, a generator)
    every step takes the next items, as many as it needs.

    `rows` says how many rows every microbatch has, for the weight of its mean loss;
    otherwise the batch size of each is found as for a whole batch.
    """

    def __init__(self, items: Iterable[Any], *, rows: Sequence[int] | None = None) -> None:
        if isinstance(items, torch.Tensor | Mapping | str) or not isinstance(items, Iterable):
            raise InputError(
                "Microbatches needs a list or an iterator with one item per microbatch, "
                f"got a {type(items).__name__}"
            )
        self._items = items if isinstance(items, list | tuple) else iter(items)
        self.rows = None if rows is None else tuple(rows)

    def take(self, chunks: int) -> list[Any]:
        """The next `chunks` items.

        Raises:
            InputError: there are more or fewer.
        """
        check_chunks(chunks)
        if isinstance(self._items, list | tuple):
            items = list(self._items)
        else:
            items = list(islice(self._items, chunks))
        if len(items) != chunks:
            left = "" if isinstance(self._items, list | tuple) else " left in the iterator"
            raise InputError(
                f"{chunks} microbatches are needed, Microbatches has {len(items)}{left}"
            )
        if self.rows is not None and len(self.rows) != chunks:
            raise InputError(f"{chunks} microbatches, but rows={self.rows} has {len(self.rows)}")
        return items


def split_args_kwargs_into_chunks(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The arguments of every microbatch: a list of `args`, and a list of `kwargs`.

    `args_chunk_spec` is a tuple with a spec for every positional argument,
    `kwargs_chunk_spec` a dict with specs for some or all keyword arguments. A spec is a
    `TensorChunkSpec(dim)`, `Replicate()`, None (the default rule), or, for a nested
    argument, a tree of these; one spec for a nested argument holds for all its tensors.

    Raises:
        InputError: specs that do not fit, inputs that cannot be told, too few rows.
    """
    split = split_batch(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec)
    return split.args, split.kwargs


def split_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    *,
    target: Any = None,
    target_chunk_spec: Any = None,
) -> Split:
    """Everything a step needs, split together: inputs, target and the rows of each.

    A target is split along dimension 0, and every tensor in it that has a dimension must
    have the rows of the batch: nothing of a target is broadcast. `args` may be a single
    `Microbatches`, and so may `target`; a whole target follows pre-split inputs.

    A rank that has no inputs may pass none (specs for them are then not looked at).

    Raises:
        InputError: as `split_args_kwargs_into_chunks`; a target that does not fit.
    """
    check_chunks(chunks)
    kwargs = dict(kwargs or {})
    if _is_presplit(args, kwargs):
        split = _presplit(args[0], chunks, args_chunk_spec, kwargs_chunk_spec)
        if target is None:
            return split
        targets, _ = split_target(target, chunks, split.rows, spec=target_chunk_spec)
        return Split(split.args, split.kwargs, targets, split.rows)
    trees = _input_trees(args, kwargs, args_chunk_spec, kwargs_chunk_spec)
    has_target = target is not None and not isinstance(target, Microbatches)
    if has_target:
        trees.append(_target_tree(target, target_chunk_spec))
    read_trees = read(trees)
    deal = deal_rows(read_trees, chunks)
    columns = [pieces(tree, deal, chunks) for tree in read_trees]
    rows = deal.rows if deal is not None else None
    shared = shared_tensors(read_trees, chunks)
    if isinstance(target, Microbatches):
        return Split(columns[0], columns[1], target.take(chunks), rows, shared)
    return Split(columns[0], columns[1], columns[2] if has_target else None, rows, shared)


def split_target(
    target: Any, chunks: int, rows: Sequence[int] | None = None, *, spec: Any = None
) -> tuple[list[Any], tuple[int, ...] | None]:
    """The target of every microbatch, and the rows of each (None if there are none).

    For a rank that has the target but not the inputs, or inputs that are split already;
    `rows` are then the rows of their microbatches. Otherwise use `split_batch`.

    Raises:
        InputError: a target that does not have these rows, or too few.
    """
    check_chunks(chunks)
    if rows is not None and len(rows) != chunks:
        raise InputError(f"rows of {len(rows)} microbatches are given for {chunks}")
    if isinstance(target, Microbatches):
        items = target.take(chunks)
        if target.rows is not None or rows is not None:
            return items, target.rows or tuple(rows or ())
        return items, _rows_of_each([[_target_tree(item, spec)] for item in items])
    trees = read([_target_tree(target, spec)])
    deal = deal_rows(trees, chunks, rows)
    return pieces(trees[0], deal, chunks), deal.rows if deal is not None else None


_TreeToRead = tuple[str, str, Any, Any]


def _input_trees(
    args: Sequence[Any], kwargs: Mapping[str, Any], args_spec: Any, kwargs_spec: Any
) -> list[_TreeToRead]:
    # With a schedule's specs, a rank may well be called without these inputs.
    return [
        ("args", "args_chunk_spec", tuple(args), args_spec if args else None),
        ("kwargs", "kwargs_chunk_spec", dict(kwargs), kwargs_spec if kwargs else None),
    ]


def _target_tree(target: Any, spec: Any) -> _TreeToRead:
    return "target", "target_chunk_spec", target, spec


def _rows_of_each(calls: Sequence[list[_TreeToRead]]) -> tuple[int, ...] | None:
    found = [natural_rows(read(trees)) for trees in calls]
    return tuple(batch.rows for batch in found if batch) if all(found) else None


def _is_presplit(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Microbatches)]
    if found and (len(args), len(kwargs)) != (1, 0):
        raise InputError(
            "Microbatches must be the only input, found beside it "
            f"{len(args) + len(kwargs) - 1} other(s): put them into its items, which may be "
            "(args, kwargs) pairs"
        )
    return bool(found)


def _presplit(source: Microbatches, chunks: int, args_spec: Any, kwargs_spec: Any) -> Split:
    calls = [_as_call(item, index) for index, item in enumerate(source.take(chunks))]
    first_args, first_kwargs = calls[0]
    for index, (args, kwargs) in enumerate(calls):
        if (len(args), set(kwargs)) != (len(first_args), set(first_kwargs)):
            raise InputError(
                f"microbatches must be called alike: microbatch 0 has {_call_text(*calls[0])}, "
                f"microbatch {index} has {_call_text(args, kwargs)}"
            )
    rows = source.rows or _rows_of_each(
        [_input_trees(args, kwargs, args_spec, kwargs_spec) for args, kwargs in calls]
    )
    return Split([args for args, _ in calls], [kwargs for _, kwargs in calls], None, rows)


def _as_call(item: Any, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(item, torch.Tensor):
        return (item,), {}
    if isinstance(item, Mapping):
        return (), _names_checked(item, index)
    if type(item) is tuple:
        if len(item) == 2 and type(item[0]) is tuple and isinstance(item[1], Mapping):
            return item[0], _names_checked(item[1], index)
        return item, {}
    raise InputError(
        f"microbatch {index} is a {type(item).__name__}: write a tensor, a tuple of positional "
        "arguments, a dict of keyword arguments, or a pair (args, kwargs)"
    )


def _names_checked(kwargs: Mapping[Any, Any], index: int) -> dict[str, Any]:
    odd = [key for key in kwargs if not isinstance(key, str)]
    if odd:
        raise InputError(
            f"microbatch {index} has keyword arguments with names that are not strings: {odd}; "
            "to pass a mapping as an argument, write ((mapping,), {})"
        )
    return dict(kwargs)


def _call_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    names = ", ".join(repr(name) for name in kwargs) or "no"
    return f"{len(args)} positional and {names} keyword arguments"
