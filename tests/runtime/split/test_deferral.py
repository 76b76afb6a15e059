"""What a deferral leaves undone, notices, lets go of and leaves alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from fxpipe.runtime.split import weight_work
from fxpipe.runtime.split.deferral import Deferral, can_defer
from fxpipe.runtime.stage.received import receive
from tests.runtime.halves import assert_same, grads_of, in_autocast, plain, seed, split
from tests.runtime.stage_modules import DIM, MODULES, Checkpointed, Lambda, inputs_for


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    assert not _get_current_function_mode_stack()


def test_autocast_keeps_no_second_copy_of_the_weights() -> None:
    layer = nn.Linear(64, 64).float()
    low = []
    module = Lambda(in_autocast, inner=layer)

    def pack(tensor: Tensor) -> Tensor:
        low.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Deferral():
        module(torch.randn(3, 64, dtype=torch.float32))

    assert low == [(3, 64)]


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "linear_used_twice",
        "tied",
        "checkpoint",
        "checkpoint_reentrant",
        "weight_used_both_ways",
        "checkpoint_both_ways",
    ],
)
def test_parameter_hooks_fire_once_with_the_whole_gradient(name: str) -> None:
    module, x = MODULES[name][0](), inputs_for(name)
    twin = copy.deepcopy(module)
    fired: dict[str, list[str]] = {"split": [], "plain": []}
    for model, log in ((module, fired["split"]), (twin, fired["plain"])):
        for key, parameter in model.named_parameters():
            # Not linear in the gradient: it must see the sum, not its parts.
            parameter.register_hook(
                lambda g, k=key, c=log: (c.append(f"grad {k}"), g.clamp(-1, 1))[1]
            )
            parameter.register_post_accumulate_grad_hook(
                lambda _, k=key, c=log: c.append(f"done {k}")
            )

    grads = [split(module, x, wants_grad=x.is_floating_point())[1] for _ in range(2)][-1]
    expected = [plain(twin, x, wants_grad=x.is_floating_point())[1] for _ in range(2)][-1]

    assert sorted(fired["split"]) == sorted(fired["plain"])
    assert_same({k: v for k, v in grads.items() if k != "input"}, grads_of(twin))
    assert expected.keys() == grads.keys()


def test_distributed_data_parallel_sees_each_whole_gradient_once() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = MODULES["layernorm"][0]()
        twin, x = copy.deepcopy(module), inputs_for("layernorm")
        wrapped = nn.parallel.DistributedDataParallel(module)
        seen: list[Tensor] = []

        def reduce(_, bucket):  # annotations as text are refused
            seen.extend(gradient.clone() for gradient in bucket.gradients())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped.register_comm_hook(None, reduce)
        split(wrapped, x, wants_grad=True)
        expected = plain(twin, x, wants_grad=True)[1]
        del expected["input"]

        assert len(seen) == len(expected)
        assert_same(grads_of(module), expected)
        assert sum(g.sum() for g in seen) == pytest.approx(
            float(sum(g.sum() for g in expected.values()))
        )
    finally:
        dist.destroy_process_group()


def test_module_hooks_fire_as_in_a_plain_backward() -> None:
    module = MODULES["mlp"][0]()
    seen: list[str] = []
    module[0].register_full_backward_pre_hook(lambda *_: seen.append("pre"))
    module[0].register_full_backward_hook(lambda *_: seen.append("post"))
    module[2].register_forward_hook(lambda *_: seen.append("forward"))

    split(module, inputs_for("mlp"), wants_grad=True)

    assert seen == ["forward", "pre", "post"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_region_is_computed_again_exactly_once(use_reentrant: bool) -> None:
    calls = []
    inner = MODULES["mlp"][0]()
    inner[0].register_forward_hook(lambda *_: calls.append("forward"))
    module = Checkpointed(inner, use_reentrant=use_reentrant)

    for _ in range(3):
        split(module, inputs_for("mlp"), wants_grad=True)

    assert len(calls) == 2 * 3


def test_recomputation_on_another_thread_is_deferred_too() -> None:
    # Past some depth autograd moves nested backwards to threads of its own; the deferral
    # must be active there as well, or the gradients of these weights come too early.
    layer = nn.Linear(DIM, DIM, bias=False)
    module: nn.Module = Lambda(lambda m, x: m.a(x).tanh(), a=layer)
    for _ in range(70):
        module = Checkpointed(module, use_reentrant=True)
    twin = copy.deepcopy(module)
    (value,), slots = receive([x := torch.randn(3, DIM)], [True])
    deferral = Deferral()
    with deferral:
        output = module(value)

    deferral.backward([output], [seed(output)])

    assert layer.weight.grad is None
    deferral.run()
    grads = {"input": slots.take(0), **grads_of(module)}
    assert_same(grads, plain(twin, x, wants_grad=True)[1])


def test_nothing_is_kept_after_the_weight_half() -> None:
    module = MODULES["mlp"][0]()
    gc.collect()
    gc.disable()
    try:
        (value,), slots = receive([torch.randn(3, DIM)], [True])
        deferral = Deferral()
        with deferral:
            hidden = module[1](module[0](value))
            output = module[2](hidden)
        alive = [weakref.ref(t) for t in (value, hidden, output)]
        graph = weakref.ref(output.grad_fn)
        deferral.backward([output], [seed(output)])
        del output, hidden, value
        assert graph() is None  # the graph goes with the input half
        deferral.run()

        assert [reference() for reference in alive] == [None] * 3
        assert slots.take(0) is not None
        assert slots.take(0) is None
    finally:
        gc.enable()


class Token:
    """Something large that a user's Function keeps on its context."""


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_deferred_work_does_not_keep_the_graph_before_it() -> None:
    layer, token = nn.Linear(DIM, DIM), Token()
    kept = weakref.ref(token)
    (value,), _ = receive([torch.randn(3, DIM)], [True])
    deferral = Deferral()
    with deferral:
        output = layer(Keeps.apply(value, token))
    deferral.backward([output], [seed(output)])

    del output, token, value

    assert kept() is None
    assert layer.weight.grad is None  # the work itself is still there


def test_gradients_become_the_parameters_own_without_a_copy(monkeypatch: Any) -> None:
    handed: list[int] = []
    original = weight_work._hand_over

    def spy(parameters: list[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> None:
        handed.extend(sums[parameter].data_ptr() for parameter in parameters)
        original(parameters, sums)

    monkeypatch.setattr(weight_work, "_hand_over", spy)
    monkeypatch.setattr(weight_work, "_BATCH_BYTES", 64)
    module = MODULES["mlp"][0]()

    split(module, inputs_for("mlp"), wants_grad=True)

    assert sorted(handed) == sorted(p.grad.data_ptr() for p in module.parameters())


def test_saved_input_passes_through_saved_tensor_hooks() -> None:
    packed: list[int] = []
    layer = nn.Linear(DIM, DIM)
    x = torch.randn(3, DIM)
    twin = copy.deepcopy(layer)

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.data_ptr())
        return tensor / 2

    def offloaded(m: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t * 2):
            return m.inner(x)

    _, grads = split(Lambda(offloaded, inner=layer), x, wants_grad=True)

    assert len(packed) == 1
    expected = plain(Lambda(lambda m, x: m.inner(x), inner=twin), x, wants_grad=True)[1]
    assert_same(grads, expected)


@pytest.mark.parametrize("what", ["input", "weight"])
def test_writing_to_what_backward_needs_raises_as_in_a_plain_backward(what: str) -> None:
    layer = nn.Linear(DIM, DIM)

    def spoil(m: Any, x: Tensor) -> Tensor:
        x = x.tanh() * 1
        y = m.layer(x)
        with torch.no_grad():
            (x if what == "input" else m.layer.weight).mul_(2)
        return y

    module = Lambda(spoil, layer=layer)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(copy.deepcopy(module), torch.randn(3, DIM), wants_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        split(module, torch.randn(3, DIM), wants_grad=True)


def test_writing_to_an_input_between_the_halves_raises() -> None:
    # The plain model cannot do this; without the check the weight gradient would be wrong.
    layer, x = nn.Linear(DIM, DIM), torch.randn(3, DIM)
    deferral = Deferral()
    with deferral:
        output = layer(x)
    deferral.backward([output], [seed(output)])
    x.zero_()

    with pytest.raises(RuntimeError, match=r"an input of shape \[3, 6\] is at version 1"):
        deferral.run()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("bad backward")


def test_failing_backward_leaves_nothing_behind() -> None:
    layer = nn.Linear(DIM, DIM)
    calls = []
    layer.weight.register_hook(lambda _: calls.append("hook"))
    before = layer.weight.grad = torch.ones_like(layer.weight)
    module = Lambda(lambda m, x: m.layer(Fails.apply(m.layer(x))), layer=layer)

    with pytest.raises(ValueError, match="bad backward"):
        split(module, torch.randn(3, DIM), wants_grad=True)

    assert not _get_current_function_mode_stack()
    assert layer.weight.grad is before
    layer(torch.randn(3, DIM)).sum().backward()
    assert calls == ["hook"]


def test_failing_forward_leaves_nothing_behind() -> None:
    def fail(m: Any, x: Tensor) -> Tensor:
        raise ValueError("bad forward")

    with pytest.raises(ValueError, match="bad forward"):
        split(Lambda(fail), torch.randn(3, DIM), wants_grad=True)

    assert not _get_current_function_mode_stack()


def test_backward_inside_the_forward_gives_the_gradient_at_once() -> None:
    # Training at test time: a module takes a step on its own weight while it runs.
    def step(m: Any, x: Tensor) -> Tensor:
        m.w.grad = None
        F.linear(x.detach(), m.w).square().sum().backward()
        m.seen = m.w.grad.clone()
        m.w.grad = None
        return F.linear(x, m.w)

    module = Lambda(step, w=nn.Parameter(torch.randn(DIM, DIM)))
    twin = copy.deepcopy(module)
    x = torch.randn(3, DIM)

    _, grads = split(module, x, wants_grad=True)

    assert_same(grads, plain(twin, x, wants_grad=True)[1])
    torch.testing.assert_close(module.seen, twin.seen)


def test_transforms_of_torch_func_inside_the_forward_are_left_alone() -> None:
    # A Jacobian calls autograd within a transform, where tensors have no edges that we could take.
    def step(m: Any, x: Tensor) -> Tensor:
        made = torch.func.jacrev(lambda row: torch.tanh(F.linear(row, m.w)))(x[0])
        return F.linear(x, m.w) @ made

    module = Lambda(step, w=nn.Parameter(torch.randn(DIM, DIM)))
    twin = copy.deepcopy(module)
    x = torch.randn(3, DIM)

    _, grads = split(module, x, wants_grad=True)

    assert_same(grads, plain(twin, x, wants_grad=True)[1])


def test_inner_backward_with_inputs_touches_only_those() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        F.linear(F.linear(x.detach(), m.a), m.b).sum().backward(inputs=[m.b])
        return x * 1

    module = Lambda(
        step, a=nn.Parameter(torch.ones(DIM, DIM)), b=nn.Parameter(torch.ones(DIM, DIM))
    )
    twin = copy.deepcopy(module)
    x = torch.randn(3, DIM)

    _, grads = split(module, x, wants_grad=True)

    assert grads["a"] is None
    assert_same(grads, plain(twin, x, wants_grad=True)[1])


@pytest.mark.parametrize("frozen", [["weight"], ["weight", "bias"]])
def test_parameter_frozen_after_the_forward_gets_no_gradient(frozen: list[str]) -> None:
    layer = nn.Linear(DIM, DIM)
    deferral = Deferral()
    with deferral:
        output = layer(torch.randn(2, DIM))
    deferral.backward([output], [torch.ones_like(output)])
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)

    deferral.run()

    assert [name for name, grad in grads_of(layer).items() if grad is None] == frozen


def test_compiled_modules_are_not_watched() -> None:
    plain_module = MODULES["mlp"][0]()
    with_compiled = nn.Sequential(torch.compile(nn.Linear(DIM, DIM), backend="eager"))
    compiled_in_place = nn.Linear(DIM, DIM)
    compiled_in_place.compile(backend="eager")

    assert can_defer(plain_module)
    assert not can_defer(with_compiled)
    assert not can_defer(nn.Sequential(compiled_in_place))


# The compiler looks at `.grad` of its inputs, whatever they are.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_function_inside_a_module_is_right_and_built_once() -> None:
    built = []

    def backend(graph: Any, _: Any) -> Any:
        built.append(graph)
        return graph.forward

    layer = nn.Linear(DIM, DIM)
    compiled = torch.compile(lambda x: layer(x).tanh(), backend=backend)
    module = Lambda(lambda m, x: m.layer(compiled(x)), layer=layer)
    twin_layer = copy.deepcopy(layer)
    twin = Lambda(lambda m, x: m.layer(m.layer(x).tanh()), layer=twin_layer)
    x = torch.randn(3, DIM)

    for _ in range(3):
        _, grads = split(module, x, wants_grad=True)
        _, expected = plain(twin, x, wants_grad=True)

    assert_same(grads, expected)
    assert len(built) == 1
