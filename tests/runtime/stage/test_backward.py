"""Both halves of a split backward give what one plain backward gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from fxpipe.runtime.split.deferral import Deferral
from fxpipe.runtime.split.engine import run_backward
from fxpipe.runtime.stage.received import Slots, receive
from tests.runtime.halves import assert_same, grads_of, in_autocast, plain, seed, split
from tests.runtime.stage_modules import DIM, MODULES, Lambda, inputs_for


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    assert not _get_current_function_mode_stack()


def freeze_every_other(module: nn.Module) -> None:
    for parameter in list(module.parameters())[::2]:
        parameter.requires_grad_(False)


def freeze_all(module: nn.Module) -> None:
    module.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for jvp
@pytest.mark.parametrize("wants_grad", [True, False], ids=["input_grad", "no_input_grad"])
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        (name, frozen)
        for name in MODULES
        for frozen in (None, freeze_every_other, freeze_all)
        if frozen is None or name != "inner_step"  # differentiates by its weight
    ],
)
def test_two_halves_equal_one_backward(
    name: str, frozen: Callable[[nn.Module], None] | None, wants_grad: bool
) -> None:
    x = inputs_for(name)
    module = MODULES[name][0]()
    if frozen is not None:
        frozen(module)
    wants_grad = wants_grad and x.is_floating_point()
    twin = copy.deepcopy(module)

    output, grads = split(module, x, wants_grad=wants_grad)

    expected_output, expected = plain(twin, x, wants_grad=wants_grad)
    torch.testing.assert_close(output, expected_output, rtol=1e-12, atol=1e-12)
    assert_same(grads, expected)


@pytest.mark.parametrize(
    "name", ["mlp_of_batches", "conv2d", "addmm", "matmul_right", "einsum", "tied"]
)
def test_low_precision_module(name: str) -> None:
    module = MODULES[name][0]().to(torch.bfloat16)
    x = inputs_for(name)
    x = x.to(torch.bfloat16) if x.is_floating_point() else x
    twin = copy.deepcopy(module)

    _, grads = split(module, x, wants_grad=x.is_floating_point())

    assert_same(grads, plain(twin, x, wants_grad=x.is_floating_point())[1], tolerance=1e-2)


@pytest.mark.parametrize(
    "name", ["mlp_of_batches", "conv2d", "addmm", "matmul_right", "einsum", "tied"]
)
@pytest.mark.parametrize("wants_grad", [True, False])
def test_autocast(name: str, wants_grad: bool) -> None:
    module = MODULES[name][0]().float()
    x = inputs_for(name)
    x = x.float() if x.is_floating_point() else x
    wants_grad = wants_grad and x.is_floating_point()
    twin = copy.deepcopy(module)
    mixed = Lambda(in_autocast, inner=module)

    _, grads = split(mixed, x, wants_grad=wants_grad)

    expected = plain(Lambda(in_autocast, inner=twin), x, wants_grad=wants_grad)[1]
    assert_same(grads, expected, tolerance=1e-2)
    if name == "mlp_of_batches":
        # One row of operations, so the same low-precision products in the same order.
        assert_same(grads, expected, tolerance=1e-6)


def test_gradients_add_up_over_microbatches() -> None:
    module, x = MODULES["mlp"][0](), torch.randn(4, DIM)
    twin = copy.deepcopy(module)
    deferrals = [Deferral(), Deferral()]
    outputs = []
    for deferral, part in zip(deferrals, x.chunk(2), strict=True):
        with deferral:
            outputs.append(module(part))

    for deferral, output in zip(deferrals, outputs, strict=True):
        deferral.backward([output], [torch.ones_like(output)])
    for deferral in reversed(deferrals):
        deferral.run()

    twin(x).sum().backward()
    assert_same(grads_of(module), grads_of(twin))


def test_whole_backward_of_a_deferred_forward() -> None:
    # As the executor may call it, with the deferral active around an ordinary backward.
    module, x = MODULES["mlp"][0](), torch.randn(4, DIM)
    twin = copy.deepcopy(module)
    deferral = Deferral()
    with deferral:
        output = module(x)

    with deferral:
        run_backward([output], [seed(output)])
    assert all(grad is None for grad in grads_of(module).values())
    deferral.run()

    assert_same(
        grads_of(module),
        {k: v for k, v in plain(twin, x, wants_grad=False)[1].items() if k != "input"},
    )


def test_expanded_gradient() -> None:
    module, x = MODULES["mlp_of_batches"][0](), inputs_for("mlp_of_batches")
    twin = copy.deepcopy(module)
    deferral = Deferral()
    with deferral:
        output = module(x)

    deferral.backward([output], [torch.ones(()).expand(output.shape)])
    deferral.run()

    twin(x).sum().backward()
    assert_same(grads_of(module), grads_of(twin))


def test_received_value_is_the_buffer_and_no_leaf() -> None:
    buffers = [torch.randn(2, 3), torch.arange(3), torch.randn(4, 3)[1:3]]

    values, slots = receive(buffers, [True, False, True])

    assert [v.data_ptr() for v in values] == [b.data_ptr() for b in buffers]
    assert [v.is_leaf for v in values] == [False, True, False]
    assert values[1] is buffers[1]
    assert not buffers[0].requires_grad
    assert slots.take(0) is None


def test_received_values_collect_their_gradients() -> None:
    a, b, unused = torch.randn(2, 3), torch.randn(4, 3)[1:3], torch.randn(2)
    (x, y, z), slots = receive([a, b, unused], [True, True, True])
    calls = []
    x.register_hook(lambda _: calls.append("x"))

    x.detach()
    F.relu(y.view(-1), inplace=True)
    (x.sum() + 2 * x.sum() + 5 * y.sum()).backward()

    assert calls == ["x"]
    torch.testing.assert_close(slots.take(0), torch.full((2, 3), 3.0))
    torch.testing.assert_close(slots.take(1), 5.0 * (b > 0))
    assert slots.take(2) is None
    assert z.requires_grad


def test_in_place_write_by_the_next_stage_is_noticed_by_the_previous_one() -> None:
    # Two stages on one rank share the memory: writing to a saved output must not pass.
    output = torch.randn(3, requires_grad=True).tanh()
    (value,), slots = receive([output.detach()], [True])

    value.mul_(2).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_backward([output], [slots.take(0)])


def test_unwritten_handover_leaves_the_previous_stage_alone() -> None:
    leaf = torch.randn(3, requires_grad=True)
    output = leaf.tanh()
    (value,), slots = receive([output.detach()], [True])

    value.exp().sum().backward()
    run_backward([output], [slots.take(0)])

    assert leaf.grad is not None


def test_slots_are_empty_at_first() -> None:
    assert Slots().take(0) is None
