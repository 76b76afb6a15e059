"""Which operations leave their weight gradient for later, and which do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from fxpipe.runtime.split.deferral import Deferral
from fxpipe.runtime.stage.received import receive
from tests.runtime.halves import grads_of, seed
from tests.runtime.stage_modules import DIM, MODULES, inputs_for


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    assert not _get_current_function_mode_stack()


DEFERRED = {
    "mlp": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "mlp_of_batches": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "matmul_right": {"w"},
    "matmul_left": {"w"},
    "matmul_transposed": {"w"},
    "matmul_stack": {"w"},
    "mm": {"w"},
    "bmm": {"w"},
    "addmm": {"w", "b"},
    "baddbmm": {"w", "b"},
    "einsum": {"w"},
    "einsum_permuted": {"w"},
    "conv1d": {"weight", "bias"},
    "conv2d": {"weight", "bias"},
    "conv3d": {"weight"},
    "conv_transpose2d": {"weight", "bias"},
    "embedding": {"weight"},
    "tied": {"table.weight"},
    "layernorm": {"1.weight", "1.bias"},
    "checkpoint": {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    "checkpoint_reentrant": {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    "checkpoint_selective": {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    "tensor_subclass": set(),
    "lstm": set(),
    "complex": set(),
    "weight_norm": set(),
}


@pytest.mark.parametrize("name", DEFERRED)
def test_input_half_leaves_these_weights_undone(name: str) -> None:
    module, x = MODULES[name][0](), inputs_for(name)
    (value,), _ = receive([x], [x.is_floating_point()])
    deferral = Deferral()
    with deferral:
        output = module(value)

    deferral.backward([output], [seed(output)])

    undone = {name for name, grad in grads_of(module).items() if grad is None}
    assert undone == DEFERRED[name]


def test_wrong_call_gives_torchs_own_error() -> None:
    layer = nn.Linear(DIM, DIM)

    for bad in (torch.randn(3, DIM + 1), torch.randn(3, DIM, dtype=torch.float32)):
        with pytest.raises(RuntimeError) as plain_error:
            layer(bad)
        with pytest.raises(RuntimeError) as split_error, Deferral():
            layer(bad)
        assert str(split_error.value) == str(plain_error.value)
