from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from fxpipe.errors import InputError
from fxpipe.microbatch import (
    Microbatches,
    Replicate,
    TensorChunkSpec,
    _CustomReducer,
    _LossReducer,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
    split_batch,
    split_target,
    sum_reducer,
)


class Packed(NamedTuple):
    cu_seqlens: torch.Tensor
    longest: int


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    rows: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass
class Registered:
    x: torch.Tensor


_pytree.register_dataclass(Registered)


class Color(enum.Enum):
    RED = 1


class Opaque:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Names(dict):
    """An unregistered dict subclass."""


class Items(list):
    """An unregistered list subclass."""


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(one: Any, other: Any) -> bool:
    """Equal trees: same types all the way, same tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict | collections.UserDict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one is other or one == other


# ------------------------------------------------------- what happens to which kind of input

X = rand(8, 3)
TOP, BOTTOM = X[:4], X[4:]

# An argument beside a batch of 8 rows, and what both of 2 microbatches get of it.
SPLIT = {
    "tensor": (X, TOP, BOTTOM),
    "one_dimension": (torch.arange(8), torch.arange(4), torch.arange(4, 8)),
    "bool": (X > 0.5, TOP > 0.5, BOTTOM > 0.5),
    "not_contiguous": (X.t().contiguous().t(), TOP, BOTTOM),
    "expanded": (X[:1].expand(8, 3), X[:1].expand(4, 3), X[:1].expand(4, 3)),
    "list": ([X, X], [TOP, TOP], [BOTTOM, BOTTOM]),
    "tuple_with_none": ((X, None), (TOP, None), (BOTTOM, None)),
    "dict": ({"a": X, "n": 3}, {"a": TOP, "n": 3}, {"a": BOTTOM, "n": 3}),
    "nested": ({"a": [(X,)]}, {"a": [(TOP,)]}, {"a": [(BOTTOM,)]}),
    "named_tuple": (Packed(X, 5), Packed(TOP, 5), Packed(BOTTOM, 5)),
    "dataclass": (Inputs(X, 2.0), Inputs(TOP, 2.0), Inputs(BOTTOM, 2.0)),
    "frozen_dataclass": (Frozen(X), Frozen(TOP), Frozen(BOTTOM)),
    "registered_dataclass": (Registered(X), Registered(TOP), Registered(BOTTOM)),
    "model_output": (
        BaseModelOutput(last_hidden_state=X),
        BaseModelOutput(last_hidden_state=TOP),
        BaseModelOutput(last_hidden_state=BOTTOM),
    ),
    "batch_encoding": (
        BatchEncoding({"ids": X}),
        BatchEncoding({"ids": TOP}),
        BatchEncoding({"ids": BOTTOM}),
    ),
    "ordered_dict": (
        collections.OrderedDict(a=X),
        collections.OrderedDict(a=TOP),
        collections.OrderedDict(a=BOTTOM),
    ),
    "deque": (collections.deque([X]), collections.deque([TOP]), collections.deque([BOTTOM])),
    "dict_subclass": (Names(a=X), Names(a=TOP), Names(a=BOTTOM)),
    "list_subclass": (Items([X]), Items([TOP]), Items([BOTTOM])),
    "row_and_broadcast": ((X, rand(1, 3)), (TOP, rand(1, 3)), (BOTTOM, rand(1, 3))),
}

# Goes whole to every microbatch.
WHOLE = {
    "none": None,
    "number": 2.5,
    "string": "mean",
    "bool": True,
    "enum": Color.RED,
    "dtype": torch.float16,
    "size": torch.Size([8, 3]),
    "function": torch.relu,
    "module": torch.nn.Linear(8, 8),
    "object_without_tensors": Opaque([1, 2]),
    "object_with_scalar": Opaque(torch.tensor(1.0)),
    "zero_dimensions": torch.tensor(2.0),
    "one_row": rand(1, 3),
    "one_element": rand(1),
    "empty": torch.empty(0),
    "empty_columns": torch.empty(5, 0),
    "tuple_of_numbers": (1, 2, 3, 4, 5, 6, 7, 8),
    "list_of_other_length": [1, 2, 3],
    "list_of_none": [None] * 8,
    "empty_list": [],
}

# Refused, with this in the message.
REFUSED = {
    "cu_seqlens": (Packed(torch.tensor([0, 3, 5, 7, 10]), 5), "['arg'].cu_seqlens: int64[5]"),
    "one_more_than_rows": (torch.arange(9), "['arg']: int64[9] has 9 rows"),
    "lookup_table": (rand(16, 3), "['arg']: float32[16, 3] has 16 rows"),
    "causal_mask": ({"m": rand(5, 5)}, "['arg']['m']: float32[5, 5] has 5 rows"),
    "flattened_rows": (rand(24), "['arg']: float32[24] has 24 rows"),
    "sequence_first": (rand(5, 8, 3), "['arg']: float32[5, 8, 3] has 5 rows"),
    "list_with_a_number_per_row": ([3] * 8, "['arg']: a list of 8 plain values"),
    "list_with_a_list_per_row": ([[1, 2]] * 8, "['arg']: a list of 8 plain values"),
    "numpy": (np.zeros((8, 2)), "['arg']: a ndarray holds an array of shape (8, 2)"),
    "object_with_rows": (Opaque({"a": X}), "['arg']: a Opaque holds float32[8, 3]"),
    "slots_with_rows": (Slotted(X), "['arg']: a Slotted holds float32[8, 3]"),
    "set_with_rows": ({X}, "['arg']: a set holds float32[8, 3]"),
    "nested": (
        torch.nested.nested_tensor([X[i : i + 1] for i in range(8)], layout=torch.jagged),
        "['arg']: nested float32[8, ...]: a nested tensor cannot be split without a copy",
    ),
    "sparse": (X.to_sparse(), "['arg']: float32[8, 3]: a sparse_coo tensor cannot be split"),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_what_carries_the_batch_is_split(kind):
    value, top, bottom = SPLIT[kind]

    args, kwargs = split_args_kwargs_into_chunks((X, value), {"arg": value}, 2)

    assert same(args, [(TOP, top), (BOTTOM, bottom)])
    assert same(kwargs, [{"arg": top}, {"arg": bottom}])


@pytest.mark.parametrize("kind", WHOLE)
def test_what_has_no_rows_goes_whole_to_every_microbatch(kind):
    value = WHOLE[kind]

    args, kwargs = split_args_kwargs_into_chunks((X, value), {"arg": value}, 2)

    assert same(args, [(TOP, value), (BOTTOM, value)])
    assert same(kwargs, [{"arg": value}, {"arg": value}])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_other_rows_is_refused_by_name(kind):
    value, text = REFUSED[kind]

    with pytest.raises(InputError) as found:
        split_args_kwargs_into_chunks((X,), {"arg": value}, 2)

    assert f"kwargs{text}" in str(found.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_can_be_replicated(kind):
    value, _ = REFUSED[kind]

    args, kwargs = split_args_kwargs_into_chunks((X,), {"arg": value}, 2, None, {"arg": Replicate})

    assert same(args, [(TOP,), (BOTTOM,)])
    for chunk in kwargs:
        inside, want = _pytree.tree_leaves(chunk["arg"]), _pytree.tree_leaves(value)
        assert all(a is b for a, b in zip(inside, want, strict=True))


@pytest.mark.parametrize("kind", [*SPLIT, *WHOLE, *REFUSED])
def test_one_microbatch_is_the_batch_itself_and_nothing_is_refused(kind):
    value = next(
        table[kind] if table is WHOLE else table[kind][0]
        for table in (SPLIT, WHOLE, REFUSED)
        if kind in table
    )

    [args], [kwargs] = split_args_kwargs_into_chunks((X, value), {"arg": value}, 1)

    assert args[0] is X
    for got in (args[1], kwargs["arg"]):
        leaves, want = _pytree.tree_leaves(got), _pytree.tree_leaves(value)
        assert all(a is b or same(a, b) for a, b in zip(leaves, want, strict=True))


def test_refusal_names_everything_and_the_spec_to_write():
    inputs = {"packed": Packed(torch.arange(5), 5), "mask": rand(5, 5), "x": X}

    with pytest.raises(InputError) as found:
        split_args_kwargs_into_chunks(
            (X, {"table": [X, rand(4, 3)]}), inputs, 2, (TensorChunkSpec(0), None)
        )

    assert str(found.value).splitlines() == [
        "cannot tell how to split these along with the batch of 8 rows (args[0]: float32[8, 3]):",
        "  args[1]['table'][1]: float32[4, 3] has 4 rows",
        "  kwargs['packed'].cu_seqlens: int64[5] has 5 rows",
        "  kwargs['mask']: float32[5, 5] has 5 rows",
        "if every microbatch may have the whole of it, write",
        "  args_chunk_spec=(TensorChunkSpec(0), {'table': (None, Replicate())})",
        "  kwargs_chunk_spec={'packed': {'cu_seqlens': Replicate()}, 'mask': Replicate()}",
        "if it carries the batch in another dimension, write TensorChunkSpec(dim) there; if it "
        "describes how the rows are packed, pass Microbatches([...]) that are split already",
    ]


def test_the_spec_that_a_refusal_proposes_works():
    value = {"table": [X, rand(4, 3)]}

    args, _ = split_args_kwargs_into_chunks(
        (X, value), {}, 2, (TensorChunkSpec(0), {"table": (None, Replicate())})
    )

    assert same(args[1], (BOTTOM, {"table": [BOTTOM, rand(4, 3)]}))


def test_array_without_any_tensor_is_refused():
    with pytest.raises(InputError, match=r"args\[0\]: a ndarray holds an array of shape \(8, 2\)"):
        split_args_kwargs_into_chunks((np.zeros((8, 2)),), {}, 2)


def test_filled_cache_is_refused_by_name():
    cache = DynamicCache()
    cache.update(rand(8, 2, 5, 4), rand(8, 2, 5, 4), 0)

    with pytest.raises(InputError, match=r"kwargs\['past'\]: a DynamicCache holds float32\[8, 2,"):
        split_args_kwargs_into_chunks((X,), {"past": cache}, 2)


# --------------------------------------------------------------------------- the batch size


@pytest.mark.parametrize(
    ("rows", "chunks", "want"),
    [(10, 4, [3, 3, 2, 2]), (8, 4, [2, 2, 2, 2]), (7, 7, [1] * 7), (5, 1, [5]), (1, 1, [1])],
)
def test_rows_are_dealt_as_evenly_as_possible(rows, chunks, want):
    x = rand(rows, 2)

    split = split_batch((x,), {}, chunks)

    assert [len(args[0]) for args in split.args] == want
    assert split.rows == tuple(want)
    assert torch.equal(torch.cat([args[0] for args in split.args]), x)


def test_too_few_rows_are_an_error_with_both_numbers():
    with pytest.raises(
        InputError,
        match=r"a batch of 3 rows cannot be split into 4 microbatches \(args\[0\]: float",
    ):
        split_args_kwargs_into_chunks((rand(3, 8),), {}, 4)


def test_empty_batch_is_too_few_rows():
    with pytest.raises(InputError, match="a batch of 0 rows cannot be split into 2 microbatches"):
        split_args_kwargs_into_chunks((torch.empty(0, 3),), {}, 2)


@pytest.mark.parametrize("chunks", [0, -1, 2.0, True, None])
def test_number_of_microbatches_must_be_a_positive_int(chunks):
    with pytest.raises(InputError, match="positive int, got"):
        split_args_kwargs_into_chunks((X,), {}, chunks)


def test_broadcast_row_does_not_decide_the_batch_wherever_it_stands():
    bias = rand(1, 3)

    first, _ = split_args_kwargs_into_chunks((bias, X), {}, 4)
    _, named = split_args_kwargs_into_chunks((), {"bias": bias, "x": X}, 4)

    assert [[t.shape[0] for t in args] for args in first] == [[1, 2]] * 4
    assert [[t.shape[0] for t in kwargs.values()] for kwargs in named] == [[1, 2]] * 4


def test_batch_of_one_row_is_not_a_broadcast_over_a_table():
    # The last batch of an epoch may have one row: the table beside it must not become the batch.
    with pytest.raises(InputError, match=r"batch of 1 rows .*\n.*'table'\]: float32\[8, 3\] has 8"):
        split_args_kwargs_into_chunks((rand(1, 3),), {"table": rand(8, 3)}, 4)


def test_order_of_keywords_does_not_turn_a_refusal_into_a_split():
    ids, positions = torch.zeros(8, 16, dtype=torch.long), torch.arange(16)

    for kwargs in ({"a": ids, "b": positions}, {"b": positions, "a": ids}):
        with pytest.raises(InputError, match="cannot tell how to split"):
            split_args_kwargs_into_chunks((), kwargs, 2)


def test_spec_fixes_the_batch_size():
    columns = rand(3, 8)

    args, kwargs = split_args_kwargs_into_chunks(
        (rand(1, 3), columns), {"x": X}, 2, (None, TensorChunkSpec(1))
    )

    assert [chunk[1].shape for chunk in args] == [(3, 4), (3, 4)]
    assert torch.equal(args[1][1], columns[:, 4:])
    assert same(kwargs, [{"x": TOP}, {"x": BOTTOM}])


def test_no_inputs_at_all_make_empty_calls_and_specs_are_not_looked_at():
    split = split_batch((), None, 3, (TensorChunkSpec(0),), {"mask": Replicate()})

    assert (split.args, split.kwargs, split.rows) == ([()] * 3, [{}] * 3, None)


def test_inputs_without_rows_are_repeated_and_have_no_rows():
    split = split_batch((torch.tensor(1.0), 3), {}, 2)

    assert split.args == [(torch.tensor(1.0), 3)] * 2
    assert split.rows is None


# -------------------------------------------------------------------------------- the specs


def test_specs_print_as_they_are_written():
    assert repr(TensorChunkSpec(1)) == str(TensorChunkSpec(1)) == "TensorChunkSpec(1)"
    assert repr(Replicate()) == "Replicate()"
    assert repr(TensorChunkSpec.from_tuple((0, (1, None)))) == (
        "(TensorChunkSpec(0), (TensorChunkSpec(1), None))"
    )
    assert TensorChunkSpec.from_dict({"a": 0, "b": [Replicate, 1]}) == {
        "a": TensorChunkSpec(0),
        "b": [Replicate(), TensorChunkSpec(1)],
    }
    assert TensorChunkSpec(2).split_dim == 2


def test_other_spellings_are_the_same_classes():
    assert _Replicate is Replicate
    assert issubclass(_LossReducer, _CustomReducer)
    assert isinstance(sum_reducer, _LossReducer)


@pytest.mark.parametrize("dim", ["0", 1.0, True, None])
def test_spec_without_a_dimension_is_refused(dim):
    with pytest.raises(InputError, match="TensorChunkSpec needs a dimension"):
        TensorChunkSpec(dim)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_dimension_can_be_split(dim):
    cube = rand(4, 4, 4)

    args, _ = split_args_kwargs_into_chunks((cube,), {}, 3, TensorChunkSpec.from_tuple((dim,)))

    assert [chunk[0].shape[dim] for chunk in args] == [2, 1, 1]
    assert torch.equal(torch.cat([chunk[0] for chunk in args], dim), cube)


def test_one_spec_holds_for_all_tensors_of_a_nested_argument():
    nested = {"a": rand(3, 8), "b": [rand(2, 8, 2), None, "name"]}

    args, _ = split_args_kwargs_into_chunks((nested,), {}, 2, (TensorChunkSpec(1),))

    assert [args[1][0]["a"].shape, args[1][0]["b"][0].shape] == [(3, 4), (2, 4, 2)]
    assert args[0][0]["b"][1:] == [None, "name"]


def test_one_spec_holds_for_all_arguments():
    args, kwargs = split_args_kwargs_into_chunks(
        (rand(3, 8), rand(2, 8)), {"table": X}, 2, TensorChunkSpec(1), Replicate()
    )

    assert [tensor.shape for tensor in args[0]] == [(3, 4), (2, 4)]
    assert kwargs[0]["table"] is X


@pytest.mark.parametrize(
    "spec",
    [
        {"packed": {"cu_seqlens": Replicate()}},
        {"packed": Packed(Replicate(), None)},
        {"packed": (Replicate(), None)},
        {"packed": [_Replicate, None]},
    ],
)
def test_spec_tree_matches_by_name_or_position(spec):
    packed = Packed(torch.arange(5), 5)

    _, kwargs = split_args_kwargs_into_chunks((X,), {"x": X, "packed": packed}, 2, None, spec)

    assert kwargs[1]["packed"].cu_seqlens is packed.cu_seqlens
    assert torch.equal(kwargs[1]["x"], BOTTOM)


def test_order_of_names_in_a_spec_does_not_matter():
    kwargs = {"a": rand(8, 3), "b": rand(3, 8)}
    spec = {"b": TensorChunkSpec(1), "a": TensorChunkSpec(0)}

    _, chunks = split_args_kwargs_into_chunks((), kwargs, 4, None, spec)

    assert [chunks[0]["a"].shape, chunks[0]["b"].shape] == [(2, 3), (3, 2)]


def test_spec_for_a_missing_value_is_fine():
    _, kwargs = split_args_kwargs_into_chunks(
        (X,), {"mask": None}, 2, None, {"mask": TensorChunkSpec(0)}
    )

    assert kwargs == [{"mask": None}] * 2


def test_spec_for_a_field_that_is_none_is_fine():
    # Model outputs and registered dataclasses leave out what is None when they are opened.
    inputs = BaseModelOutput(last_hidden_state=X)
    spec = {"last_hidden_state": None, "hidden_states": TensorChunkSpec(1)}

    args, _ = split_args_kwargs_into_chunks((inputs,), {}, 2, (spec,))

    assert same(args[1][0], BaseModelOutput(last_hidden_state=BOTTOM))
    with pytest.raises(InputError, match=r"args_chunk_spec\[0\] names 'hidden', but args\[0\] has"):
        split_args_kwargs_into_chunks((inputs,), {}, 2, ({"hidden": TensorChunkSpec(1)},))


SPEC_FAULTS = {
    "misspelt": (
        (None, {"maks": Replicate()}),
        "kwargs_chunk_spec names 'maks', but kwargs has 'mask', 'n': did you mean 'mask'?",
    ),
    "misspelt_inside": (
        (({"q": Replicate()}, None), None),
        "args_chunk_spec[0] names 'q', but args[0] has 'x'",
    ),
    "too_long": (
        (TensorChunkSpec.from_tuple((0, 0, 0)), None),
        "args_chunk_spec has 3 entries, but args has 2",
    ),
    "positions_for_names": (
        (None, (None, None)),
        "kwargs_chunk_spec is a tuple, but kwargs has names: write a dict",
    ),
    "no_such_dimension": (
        ((None, TensorChunkSpec(2)), None),
        "args[1]: float32[8, 3] has no dimension 2 (TensorChunkSpec(2)), only 0 to 1",
    ),
    "no_dimension": (
        (None, {"mask": TensorChunkSpec(0)}),
        "kwargs['mask']: float32[] has no dimension 0 (TensorChunkSpec(0)), none at all",
    ),
    "number": (
        (None, {"n": TensorChunkSpec(0)}),
        "kwargs['n']: int 3 cannot be split by TensorChunkSpec(0): write Replicate()",
    ),
    "int_as_spec": (
        ((None, 1), None),
        "args_chunk_spec[1] is the number 1: write TensorChunkSpec(1)",
    ),
    "string_as_spec": (
        ((None, "rows"), None),
        "args_chunk_spec[1] is 'rows' (builtins.str): a spec is TensorChunkSpec(dim)",
    ),
    "tree_for_a_tensor": (
        ((None, (TensorChunkSpec(0),)), None),
        "args_chunk_spec[1] is (TensorChunkSpec(0),) (builtins.tuple): a spec is",
    ),
    "reducer": (((None, sum_reducer), None), "merges outputs, it cannot split an input"),
}


@pytest.mark.parametrize("fault", SPEC_FAULTS)
def test_spec_that_does_not_fit_is_an_error_that_says_where(fault):
    (args_spec, kwargs_spec), text = SPEC_FAULTS[fault]
    kwargs = {"mask": torch.tensor(1.0), "n": 3}

    with pytest.raises(InputError, match="the chunk specs do not fit the inputs:") as found:
        split_args_kwargs_into_chunks(({"x": X}, X), kwargs, 2, args_spec, kwargs_spec)

    assert text in str(found.value)


def test_all_faults_of_specs_are_reported_together():
    with pytest.raises(InputError) as found:
        split_args_kwargs_into_chunks((X,), {"m": X}, 2, (None, None), {"k": 0, "m": 1})

    assert len(str(found.value).splitlines()) == 4


def test_what_a_spec_names_is_split_along_its_own_rows():
    x, wide, long = rand(4, 3), rand(8, 3), rand(3, 6)
    specs = TensorChunkSpec.from_tuple((0, 0, 1))

    args, _ = split_args_kwargs_into_chunks((x, wide, long), {}, 2, specs)

    assert [[tuple(part.shape) for part in call] for call in args] == [
        [(2, 3), (4, 3), (3, 3)],
        [(2, 3), (4, 3), (3, 3)],
    ]
    for found, whole in zip(merge_chunks(args, specs), (x, wide, long), strict=True):
        assert torch.equal(found, whole)


def test_what_a_spec_names_needs_a_row_for_each_microbatch():
    with pytest.raises(InputError, match=r"args\[1\].*1 rows cannot be split into 2 microbatches"):
        split_args_kwargs_into_chunks((X, rand(1, 3)), {}, 2, TensorChunkSpec.from_tuple((0, 0)))


def test_a_target_has_the_rows_of_the_batch_whatever_its_spec():
    with pytest.raises(InputError, match=r"4 rows cannot be split .* the batch of 8 rows"):
        split_batch((X,), {}, 2, target=rand(4, 3), target_chunk_spec=TensorChunkSpec(0))


def test_a_keyword_tensor_with_one_row_per_microbatch_is_split_by_rows():
    table = rand(4, 5)

    _, kwargs = split_args_kwargs_into_chunks((X,), {"table": table, "no": None, "n": 3}, 4)

    for microbatch, found in enumerate(kwargs):
        assert torch.equal(found["table"], table[microbatch : microbatch + 1])
        assert (found["no"], found["n"]) == (None, 3)
    with pytest.raises(InputError, match=r"args\[1\]: float32\[4, 5\] has 4 rows"):
        split_args_kwargs_into_chunks((X, table), {}, 4)  # by position it stays a question


# ---------------------------------------------------------------------------- views, gradients


def test_chunks_are_views_and_gradients_flow_back():
    x = rand(5, 3).requires_grad_()

    args, _ = split_args_kwargs_into_chunks((x,), {}, 3)
    for weight, (chunk,) in enumerate(args, start=1):
        (chunk * weight).sum().backward()

    assert args[1][0].data_ptr() == x[2:].data_ptr()
    assert torch.equal(x.grad, torch.tensor([1.0, 1, 2, 2, 3])[:, None].expand(5, 3))


def test_chunk_that_requires_gradients_may_be_changed_in_place():
    # torch.split and torch.tensor_split give views that autograd does not let change.
    x = (rand(4, 3).requires_grad_()) * 1

    args, _ = split_args_kwargs_into_chunks((x,), {}, 2)

    args[0][0].mul_(2)


def test_chunk_of_a_leaf_is_as_protected_as_the_leaf():
    x = rand(4, 3).requires_grad_()

    args, _ = split_args_kwargs_into_chunks((x,), {}, 2)

    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        args[0][0].mul_(2)


def test_changing_a_chunk_in_place_leaves_what_others_saved_valid():
    # As views, all chunks would share one version counter: the second microbatch made the
    # backward of the first one fail, in a model that starts with an in-place operation.
    layer = torch.nn.Linear(3, 2)
    x = rand(4, 3)
    want = layer(x * 2).sum()

    args, _ = split_args_kwargs_into_chunks((x,), {}, 2)
    losses = [layer(chunk.mul_(2)).sum() for (chunk,) in args]
    for loss in losses:
        loss.backward()

    assert torch.allclose(sum(losses), want)
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(2, 3))
    assert args[1][0].data_ptr() == x[2:].data_ptr()


def test_changing_a_shared_tensor_in_place_is_noticed():
    # The second microbatch would work with what the first one left behind.
    scale, bias = torch.tensor(2.0), rand(1, 3)
    split = split_batch((X.clone(), scale), {"bias": bias}, 2)

    split.args[0][0].mul_(2)
    split.check_unchanged()
    split.kwargs[0]["bias"].add_(1)

    with pytest.raises(InputError, match=r"in place .*\n  kwargs\['bias'\]: float32\[1, 3\]\n"):
        split.check_unchanged()


def test_one_microbatch_shares_nothing():
    split = split_batch((X, torch.tensor(2.0)), {}, 1)

    split.args[0][1].add_(1)

    split.check_unchanged()


def test_inference_tensors_can_be_split():
    with torch.inference_mode():
        x, scale = rand(4, 2), torch.tensor(2.0)

    split = split_batch((x, scale), {}, 2)

    split.check_unchanged()
    assert [len(args[0]) for args in split.args] == [2, 2]


def test_containers_of_chunks_are_not_shared():
    args, _ = split_args_kwargs_into_chunks((X, {"cache": []}), {}, 2)

    args[0][1]["cache"].append(1)

    assert args[1][1] == {"cache": []}


# ----------------------------------------------------------------------------------- targets


def test_target_is_split_with_the_inputs():
    target = {"y": rand(10), "weight": torch.tensor(2.0), "ignore": -100}

    split = split_batch((rand(10, 2),), {}, 4, target=target)

    assert [len(chunk["y"]) for chunk in split.target] == [3, 3, 2, 2]
    assert [chunk["ignore"] for chunk in split.target] == [-100] * 4
    assert split.target[0]["weight"] is target["weight"]


@pytest.mark.parametrize("rows", [1, 7, 9, 16])
def test_target_with_other_rows_is_an_error_that_names_it(rows):
    with pytest.raises(
        InputError, match=rf"batch of 8 rows .*\n  target\['y'\]: float32\[{rows}\] has {rows} rows"
    ):
        split_batch((X,), {}, 2, target={"y": rand(rows)})


def test_target_may_be_split_along_another_dimension():
    target = rand(3, 8)

    split = split_batch((X,), {}, 2, target=target, target_chunk_spec=TensorChunkSpec(1))

    assert torch.equal(torch.cat(split.target, 1), target)


def test_without_inputs_the_target_decides_on_the_rows():
    target = rand(10)

    chunks, rows = split_target(target, 4)
    split = split_batch((), {}, 4, target=target)

    assert rows == split.rows == (3, 3, 2, 2)
    assert same(chunks, list(target.split(rows)))
    assert same(split.target, chunks)


def test_target_follows_given_rows():
    target = rand(8, 2)

    chunks, rows = split_target(target, 3, (5, 1, 2))

    assert rows == (5, 1, 2)
    assert same(chunks, list(target.split((5, 1, 2))))


def test_target_that_does_not_have_the_given_rows_is_an_error():
    with pytest.raises(
        InputError, match=r"8 rows \(microbatches of 5, 3 rows\):\n  target: float32\[7\] has 7"
    ):
        split_target(rand(7), 2, (5, 3))


def test_rows_for_another_number_of_microbatches_are_an_error():
    with pytest.raises(InputError, match="rows of 3 microbatches are given for 2"):
        split_target(rand(8), 2, (5, 2, 1))


# ------------------------------------------------------------------------------ pre-split input


def test_items_of_microbatches_are_calls():
    a, b, c = rand(2, 3), rand(2), rand(4)
    forms = {
        "tensor": (a, ((a,), {})),
        "tuple": ((a, b), ((a, b), {})),
        "mapping": ({"x": a}, ((), {"x": a})),
        "encoding": (BatchEncoding({"x": a}), ((), {"x": a})),
        "pair": (((a,), {"mask": b}), ((a,), {"mask": b})),
        "dict_as_argument": ((({"x": a},), {}), (({"x": a},), {})),
        "tensor_and_dict": ((a, {"c": c}), ((a, {"c": c}), {})),
    }

    for item, (args, kwargs) in forms.values():
        split = split_batch((Microbatches([item, item]),), {}, 2)
        assert (same(split.args, [args] * 2), same(split.kwargs, [kwargs] * 2)) == (True, True)


def test_rows_of_microbatches_are_found_or_given():
    items = [rand(5, 2), rand(2, 2), rand(1, 2)]

    assert split_batch((Microbatches(items),), {}, 3).rows == (5, 2, 1)
    assert split_batch((Microbatches(items, rows=[3, 3, 3]),), {}, 3).rows == (3, 3, 3)
    assert split_batch((Microbatches(items),), {}, 3, (TensorChunkSpec(1),)).rows == (2, 2, 2)
    assert split_batch((Microbatches([(1,), (2,)]),), {}, 2).rows is None


def test_nothing_inside_microbatches_is_sliced_or_refused():
    item = ((rand(10),), {"packed": Packed(torch.tensor([0, 4, 10]), 6)})

    split = split_batch((Microbatches([item, item]),), {}, 2)

    assert split.kwargs[0]["packed"] is item[1]["packed"]
    assert split.rows == (10, 10)


def test_iterator_gives_the_next_microbatches_to_every_step():
    source = Microbatches(rand(2, 3) + i for i in range(5))

    first = split_batch((source,), {}, 2)
    second = split_batch((source,), {}, 2)

    assert torch.equal(first.args[0][0], rand(2, 3))
    assert torch.equal(second.args[1][0], rand(2, 3) + 3)
    with pytest.raises(InputError, match="2 microbatches are needed, Microbatches has 1 left in"):
        split_batch((source,), {}, 2)


def test_list_can_be_used_again_and_must_have_the_right_length():
    source = Microbatches([rand(2, 3)] * 3)

    assert len(split_batch((source,), {}, 3).args) == len(split_batch((source,), {}, 3).args) == 3
    for chunks in (2, 4):
        with pytest.raises(InputError, match=rf"{chunks} microbatches are needed, .* has 3$"):
            split_batch((source,), {}, chunks)


def test_whole_target_follows_microbatches():
    target = rand(8)

    split = split_batch((Microbatches([rand(5, 2), rand(3, 2)]),), {}, 2, target=target)

    assert same(split.target, [target[:5], target[5:]])
    with pytest.raises(InputError, match=r"target: float32\[9\] has 9 rows"):
        split_batch((Microbatches([rand(5, 2), rand(3, 2)]),), {}, 2, target=rand(9))


def test_target_may_be_microbatches_too():
    items = [(rand(4), "left"), (rand(4), "right")]

    split = split_batch((X,), {}, 2, target=Microbatches(items))

    assert split.target == items
    assert split_target(Microbatches(items), 2) == (items, (4, 4))
    assert split_target(Microbatches(items), 2, (5, 3)) == (items, (5, 3))


MICROBATCH_FAULTS = {
    "tensor": (lambda: Microbatches(X), "got a Tensor"),
    "mapping": (lambda: Microbatches({"x": X}), "got a dict"),
    "number": (lambda: Microbatches(4), "got a int"),
    "list_item": (lambda: _step(Microbatches([[X], [X]])), "microbatch 0 is a list: write"),
    "names": (lambda: _step(Microbatches([{1: X}] * 2)), "names that are not strings"),
    "unequal_calls": (
        lambda: _step(Microbatches([((X,), {"m": X}), X])),
        "microbatch 0 has 1 positional and 'm' keyword arguments, microbatch 1 has 1 positional",
    ),
    "beside_others": (
        lambda: split_batch((Microbatches([X] * 2),), {"m": X}, 2),
        "Microbatches must be the only input",
    ),
    "as_keyword": (
        lambda: split_batch((), {"m": Microbatches([X] * 2)}, 2),
        "Microbatches must be the only input",
    ),
    "rows": (lambda: _step(Microbatches([X, X], rows=[1])), "2 microbatches, but rows="),
}


def _step(source: Microbatches) -> Any:
    return split_batch((source,), {}, 2)


@pytest.mark.parametrize("fault", MICROBATCH_FAULTS)
def test_wrong_microbatches_are_an_error(fault):
    call, text = MICROBATCH_FAULTS[fault]

    with pytest.raises(InputError) as found:
        call()

    assert text in str(found.value)


def test_inputs_and_outputs_of_a_hugging_face_model_round_trip():
    batch = {"input_ids": torch.arange(30).view(5, 6), "use_cache": False, "labels": None}

    _, kwargs = split_args_kwargs_into_chunks((), batch, 2)
    outputs = [CausalLMOutputWithPast(logits=k["input_ids"] * 2.0) for k in kwargs]
    merged = merge_chunks(outputs, None)

    assert type(merged) is CausalLMOutputWithPast
    assert merged.loss is None
    assert torch.equal(merged.logits, batch["input_ids"] * 2.0)
