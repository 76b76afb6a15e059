from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from fxpipe.errors import InputError
from fxpipe.microbatch import (
    CustomReducer,
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    sum_reducer,
)


class Pair(NamedTuple):
    left: Any
    right: Any


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


# ------------------------------------------------------------------------------- default rule


def test_tensors_are_concatenated_and_the_rest_is_kept():
    parts = [
        {"a": rand(2, 3, seed=i), "b": (rand(3, 2, seed=i), None), "n": 7, "s": "x"}
        for i in range(3)
    ]

    merged = merge_chunks(parts, None)

    assert torch.equal(merged["a"], torch.cat([part["a"] for part in parts]))
    assert torch.equal(merged["b"][0], torch.cat([part["b"][0] for part in parts]))
    assert (merged["b"][1], merged["n"], merged["s"]) == (None, 7, "x")


def test_children_are_matched_by_name_not_by_order():
    first, second = {"a": rand(2), "b": rand(3)}, {"b": rand(3, seed=1), "a": rand(2, seed=1)}

    merged = merge_chunks([first, second], None)

    assert list(merged) == ["a", "b"]
    assert torch.equal(merged["a"], torch.cat([first["a"], second["a"]]))


def test_uneven_microbatches_are_merged_to_all_rows():
    parts = [rand(rows, 2, seed=rows) for rows in (3, 3, 2, 2)]

    assert torch.equal(merge_chunks(parts, None, rows=(3, 3, 2, 2)), torch.cat(parts))


def test_one_microbatch_is_the_output_itself():
    output = {"y": rand(4), "stats": rand(3), "loss": scalar(1.0)}

    merged = merge_chunks([output], None, rows=(4,))

    assert all(merged[name] is output[name] for name in ("y", "stats"))
    assert merged["loss"] == 1


def test_mean_loss_is_weighted_by_rows_and_stays_a_scalar():
    parts = [
        CausalLMOutputWithPast(loss=scalar(value), logits=rand(rows, 2))
        for value, rows in ((1.0, 3), (3.0, 1))
    ]

    assert merge_chunks(parts, None).loss == 1.5
    assert merge_chunks(parts, None).loss.shape == ()
    assert merge_chunks([scalar(1.0), scalar(3.0)], None, rows=(3, 1)) == 1.5


def test_rows_for_the_weights_may_come_from_flattened_outputs():
    parts = [
        {"loss": scalar(value), "y": rand(rows, 2), "flat": rand(rows * 5)}
        for value, rows in ((1.0, 3), (3.0, 1))
    ]

    assert merge_chunks(parts, None)["loss"] == 1.5


def test_scalars_alone_have_equal_weights():
    assert merge_chunks([scalar(1.0), scalar(2.0), scalar(6.0)], None) == 3


def test_rows_that_contradict_each_other_leave_no_weights():
    parts = [
        {"loss": scalar(1.0), "y": rand(3), "z": rand(1)},
        {"loss": scalar(2.0), "y": rand(1), "z": rand(1)},
    ]

    with pytest.raises(
        InputError, match=r"output\['loss'\]: 0-dimensional, and the rows to weight"
    ):
        merge_chunks(parts, None)
    assert merge_chunks(parts, None, rows=(3, 1))["loss"] == 1.25


def test_scalar_that_is_the_same_everywhere_stays_exact():
    for number in (0.1, 0.2, 0.4):  # their means, weighted like this, are one bit off
        parts = [scalar(number) for _ in range(4)]
        assert torch.equal(merge_chunks(parts, None, rows=(3, 3, 2, 2)), scalar(number))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_mean_keeps_its_dtype(dtype):
    merged = merge_chunks([scalar(1, dtype), scalar(2, dtype)], None, rows=(1, 1))

    assert (merged.dtype, complex(merged)) == (dtype, 1.5)


def test_mean_carries_gradients():
    parts = [scalar(1.0).requires_grad_(), scalar(2.0).requires_grad_()]

    merge_chunks(parts, None, rows=(3, 1)).backward()

    assert [part.grad.item() for part in parts] == [0.75, 0.25]


def test_counts_must_agree_or_be_reduced():
    parts = [{"tokens": torch.tensor(n)} for n in (5, 6)]

    with pytest.raises(InputError, match=r"output\['tokens'\]: .* different values \(int64\[\]\)"):
        merge_chunks(parts, None)
    assert merge_chunks(parts, {"tokens": sum_reducer})["tokens"] == 11
    assert merge_chunks([parts[0], parts[0]], None)["tokens"] == 5


# --------------------------------------------------------------- outputs that carry no batch


def test_tensor_without_rows_is_kept_if_all_agree():
    bias = rand(5, 5)
    parts = [(rand(3), bias.clone()), (rand(2), bias.clone())]

    assert torch.equal(merge_chunks(parts, None, rows=(3, 2))[1], bias)


def test_tensor_without_rows_that_differs_is_an_error_with_the_spec_to_write():
    parts = [{"y": rand(3), "load": rand(5, seed=i)} for i in range(2)]

    with pytest.raises(InputError) as found:
        merge_chunks(parts, {"y": TensorChunkSpec(0)}, rows=(3, 2))

    message = str(found.value)
    assert "output['load']: microbatches 0 and 1 gave different values (float32[5]); " in message
    assert "microbatches of 3, 2 rows" in message
    assert "output_merge_spec), {'y': TensorChunkSpec(0), 'load': ...}: TensorChunk" in message


def test_rows_flattened_with_something_else_are_concatenated():
    parts = [rand(rows * 5, 2) for rows in (3, 2)]

    assert torch.equal(merge_chunks(parts, None, rows=(3, 2)), torch.cat(parts))


def test_number_of_outputs_must_be_that_of_the_rows():
    with pytest.raises(InputError, match="2 outputs cannot come from 3 microbatches"):
        merge_chunks([rand(1), rand(1)], None, rows=(1, 1, 1))


# -------------------------------------------------------------------------------------- specs


def test_specs_are_matched_by_name_in_any_order():
    parts = [{"a": rand(2, 2, seed=i), "b": rand(2, 2, seed=i + 9)} for i in range(3)]
    rows, columns = TensorChunkSpec(0), TensorChunkSpec(1)

    for spec in ({"a": rows, "b": columns}, {"b": columns, "a": rows}, {"b": TensorChunkSpec(-1)}):
        merged = merge_chunks(parts, spec)
        assert torch.equal(merged["a"], torch.cat([part["a"] for part in parts]))
        assert torch.equal(merged["b"], torch.cat([part["b"] for part in parts], 1))


def test_one_spec_holds_for_everything_below():
    parts = [[rand(2, 1), (rand(3, 1), None, 4)], [rand(2, 2), (rand(3, 2), None, 4)]]

    merged = merge_chunks(parts, TensorChunkSpec(1))

    assert [merged[0].shape, merged[1][0].shape, *merged[1][1:]] == [(2, 3), (3, 3), None, 4]


def test_replicate_takes_one_after_a_check():
    table = rand(3, 2)

    merged = merge_chunks([(table, 1), (table.clone(), 1)], Replicate())

    assert merged[0] is table
    with pytest.raises(
        InputError, match=r"output\[0\]: microbatches 0 and 1 gave different values"
    ):
        merge_chunks([(table, 1), (table + 1, 1)], (Replicate, None))


def test_reducers_reduce_in_order():
    parts = [{"loss": scalar(n), "log": [n], "note": None} for n in (1.0, 2.0, 4.0)]
    spec = {"loss": sum_reducer, "log": CustomReducer(10.0, operator.sub)}

    merged = merge_chunks(parts, spec)

    assert (merged["loss"], merged["log"], merged["note"]) == (7, [3.0], None)


def test_reducer_above_a_tree_leaves_what_is_not_a_number():
    parts = [{"a": scalar(n), "b": (n, "name", None)} for n in (1.0, 2.0)]

    merged = merge_chunks(parts, sum_reducer)

    assert (merged["a"], merged["b"]) == (3, (3.0, "name", None))


def test_reducer_may_merge_any_object():
    parts = [{"cache": DynamicCache(), "y": rand(1)} for _ in range(2)]
    reducer = CustomReducer((), lambda all_, one: (*all_, one))

    merged = merge_chunks(parts, {"cache": reducer})

    assert merged["cache"] == (parts[0]["cache"], parts[1]["cache"])


def test_caches_become_one_and_are_left_alone():
    parts = [DynamicCache() for _ in range(2)]
    for rows, part in enumerate(parts, start=1):
        for layer in range(3):
            part.update(rand(rows, 2, 5, 4, seed=layer), rand(rows, 2, 5, 4, seed=9), layer)

    merged = merge_chunks(parts, None, rows=[1, 2])

    assert type(merged) is DynamicCache
    assert merged.get_seq_length() == 5
    for layer, one, other in zip(merged.layers, *(part.layers for part in parts), strict=True):
        assert torch.equal(layer.keys, torch.cat([one.keys, other.keys]))
        assert torch.equal(layer.values, torch.cat([one.values, other.values]))
    assert parts[0].layers[0].keys.shape[0] == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_sum_keeps_the_dtype(dtype):
    assert merge_chunks([scalar(1, dtype), scalar(2, dtype)], sum_reducer).dtype == dtype


SPEC_FAULTS = {
    "misspelt": ({"q": None}, "the merge spec names 'q', but output has 'y', 'n'"),
    "positions": ((None, None), "the merge spec is a tuple, but output has names"),
    "dimension": ({"y": TensorChunkSpec(1)}, "output['y']: float32[2] has no dimension 1"),
    "not_a_spec": ({"y": 0}, "the merge spec['y'] is the number 0: write TensorChunkSpec(0)"),
}


@pytest.mark.parametrize("fault", SPEC_FAULTS)
def test_spec_that_does_not_fit_is_an_error(fault):
    spec, text = SPEC_FAULTS[fault]

    with pytest.raises(InputError) as found:
        merge_chunks([{"y": rand(2), "n": 1}] * 2, spec)

    assert text in str(found.value)


# ------------------------------------------------------------------------------------- faults


def offloaded():
    cache = DynamicCache()
    cache.offloading = True  # as an argument it asks for a stream, which a machine may not have
    return cache


UNMERGEABLE = {
    "keys": (
        [{"a": 1}, {"a": 1, "b": 2}],
        "output: microbatch 0 gave a dict with 'a', microbatch 1 gave a dict with 'a', 'b'",
    ),
    "length": (
        [(1, [2]), (1, [2, 3])],
        "output[1]: microbatch 0 gave a list of 1, microbatch 1 gave a list of 2",
    ),
    "type": ([[1], (1,)], "output: microbatch 0 gave a list of 1, microbatch 1 gave a tuple of 1"),
    "none": (
        [Pair(rand(2), 1), Pair(None, 1)],
        "output.left: microbatch 0 gave float32[2], microbatch 1 gave None",
    ),
    "none_first": (
        [Pair(None, 1), Pair(rand(2), 1)],
        "output.left: microbatch 0 gave None, microbatch 1 gave float32[2]",
    ),
    "number": (
        [{"n": 7}, {"n": 7}, {"n": 8}],
        "output['n']: microbatch 0 gave int 7, microbatch 2",
    ),
    "shape": (
        [rand(2, 5), rand(2, 7)],
        "microbatch 0 gave float32[2, 5], microbatch 1 gave float32[2, 7]; these do not fit along",
    ),
    "dimensions": ([rand(2), rand(2, 7)], "gave float32[2], microbatch 1 gave float32[2, 7]"),
    "dtype": (
        [rand(2), rand(2).double()],
        "microbatch 0 gave float32[2], microbatch 1 gave float64",
    ),
    "mixed_scalars": ([rand(2), scalar(1.0)], "gave float32[2], microbatch 1 gave float32[]"),
    "nested": (
        [torch.nested.nested_tensor([rand(2), rand(1)], layout=torch.jagged)] * 2,
        "output: nested tensors cannot be concatenated",
    ),
    "array": ([np.zeros(2), np.ones(2)], "microbatches 0 and 1 gave different values (a ndarray)"),
    "object": ([object(), object()], "gave different values (a object)"),
    "offloaded cache": (
        [offloaded(), offloaded()],
        "gave different values (a DynamicCache)",
    ),
}


@pytest.mark.parametrize("fault", UNMERGEABLE)
def test_what_cannot_be_merged_is_named(fault):
    parts, text = UNMERGEABLE[fault]

    with pytest.raises(InputError, match="cannot merge the outputs of the microbatches:") as found:
        merge_chunks(parts, None)

    assert text in str(found.value)


def test_all_faults_are_reported_together():
    parts = [{"a": 1, "b": [rand(2, 1)], "c": 3}, {"a": 2, "b": [rand(2, 2)], "c": 3}]

    with pytest.raises(InputError, match=r"(?s)output\['a'\].*output\['b'\]\[0\]") as found:
        merge_chunks(parts, None)

    assert "{'a': ..., 'b': (...,)}" in str(found.value)


def test_nothing_to_merge_is_an_error():
    with pytest.raises(InputError, match="no microbatch gave an output"):
        merge_chunks([], None)


def test_equal_values_of_unusual_kinds_are_kept():
    array, shape = np.arange(3), torch.Size([2, 3])
    parts = [{"nan": float("nan"), "array": array.copy(), "shape": shape} for _ in range(2)]

    merged = merge_chunks(parts, None)

    assert merged["nan"] != merged["nan"]
    assert merged["shape"] is shape
    assert (merged["array"] == array).all()
