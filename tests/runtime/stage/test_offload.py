"""Activations on the host between forward and backward: same gradients, and really away."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpipe import LocalGroup, get_schedule_class, pipeline
from fxpipe.errors import InputError
from fxpipe.example_models import gpt
from fxpipe.program.generators import SCHEDULES, get_schedule
from fxpipe.runtime.stage.offload import SavedTensors


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "ForwardOnly"])
def test_every_schedule_has_the_plain_gradients(name):
    info = get_schedule(name)
    num_stages = 2 if info.stages_per_rank == (1, 1) else 4
    torch.manual_seed(0)
    model = gpt.build(layers=4)
    ids = torch.randint(64, (8, 8))
    pipe = pipeline(model, (ids[:2],), num_stages=num_stages, check=False)
    stages = [pipe.build_stage(i, "cpu", LocalGroup(2)) for i in range(num_stages)]
    schedule = get_schedule_class(name)(stages, 4, loss_fn=gpt.loss_fn, offload=2)

    for _ in range(2):
        model.zero_grad()
        schedule.step(ids, target=ids)
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    gpt.loss_fn(model(ids), ids).backward()

    assert "OFFLOAD" in str(schedule.lowered())
    for n, p in model.named_parameters():
        torch.testing.assert_close(found[n], p.grad, rtol=1e-4, atol=1e-5)


def saved_in(function):
    saved = SavedTensors(torch.device("cpu"))
    with saved:
        output = function()
    return saved, output


def test_tensors_are_away_between_offload_and_reload_and_weights_stay():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    saved, output = saved_in(lambda: layer(torch.tanh(x)) * torch.tanh(x))
    before = list(saved._known.values())
    assert all(one.tensor.data_ptr() != layer.weight.data_ptr() for one in before)

    saved.offload()
    assert before and all(one.tensor is None for one in before)
    saved.reload()
    assert all(one.tensor is not None for one in before)
    output.sum().backward()

    got, weight = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None
    (layer(torch.tanh(x)) * torch.tanh(x)).sum().backward()
    assert torch.equal(got, x.grad)
    assert torch.equal(weight, layer.weight.grad)


def test_a_tensor_that_several_operations_save_is_moved_once():
    x = torch.randn(4, 8, requires_grad=True)
    hidden = torch.tanh(x)

    saved, _ = saved_in(lambda: hidden.sin() + hidden.cos() + hidden.exp().sin())

    assert len(saved._known) == 2


def test_what_a_backward_has_used_is_not_kept():
    x = torch.randn(4, 8, requires_grad=True)
    saved, output = saved_in(lambda: x.sin().cos().tanh())
    saved.offload()

    output.sum().backward()

    assert len(saved._known) == 0


def test_a_change_in_place_is_an_error_and_not_another_gradient():
    x = torch.randn(4, 8, requires_grad=True)
    hidden = x * 2
    saved, output = saved_in(lambda: hidden.sin())
    with torch.no_grad():
        hidden.add_(1)

    with pytest.raises(InputError, match=r"shape \[4, 8\] that a backward needs was changed in pl"):
        saved.offload()
    with pytest.raises(InputError, match="changed in place"):
        output.sum().backward()


def test_checkpointed_regions_recompute_as_before():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    saved, output = saved_in(lambda: checkpoint(layer, torch.sin(x), use_reentrant=False).tanh())
    saved.offload()

    output.sum().backward()

    got = x.grad.clone()
    x.grad = None
    layer(torch.sin(x)).tanh().sum().backward()
    assert torch.equal(got, x.grad)
