"""Schedules and stages called as torch's are: split inputs, contexts, stages in any order."""

from contextlib import contextmanager, suppress

import pytest
import torch

from fxpipe import (
    InputError,
    LocalGroup,
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from fxpipe.stage import PipelineStageInfo
from tests.runtime.stages import Block, mse, rand


class Scaled(Block):
    def forward(self, x, scale=None):
        return super().forward(x if scale is None else x * scale)


def made(kind=ScheduleInterleaved1F1B, order=(0, 1, 2, 3), module=Scaled, loss_fn=mse, **options):
    torch.manual_seed(0)
    modules = [module().double() for _ in range(4)]
    ranks = 4 if kind is ScheduleGPipe else 2
    stages = [PipelineStage(m, i, 4, "cpu", group=LocalGroup(ranks)) for i, m in enumerate(modules)]
    return kind([stages[i] for i in order], 4, loss_fn=loss_fn, **options), stages


def gradients(stages):
    return [p.grad for stage in stages for p in stage.submod.parameters()]


def assert_equal(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble, ScheduleGPipe])
def test_stages_may_be_given_in_any_order(kind):
    x, y = rand(8, 8), rand(8, 8, seed=2)
    straight, expected = made(kind)
    mixed, stages = made(kind, order=(3, 0, 2, 1))

    straight.step(x, target=y)
    mixed.step(x, target=y)

    assert_equal(gradients(stages), gradients(expected))


def test_inputs_that_are_split_already_are_those_of_the_whole_batch():
    x, y, scale = rand(8, 8), rand(8, 8, seed=2), rand(8, 1, seed=3)
    whole, expected = made()
    split, stages = made()
    losses, split_losses = [], []

    output = whole.step(x, scale=scale, target=y, losses=losses)
    found = split.step(
        arg_mbs=[(part,) for part in x.chunk(4)],
        kwarg_mbs=[{"scale": part} for part in scale.chunk(4)],
        target_mbs=list(y.chunk(4)),
        losses=split_losses,
        finalize_gradients=True,
    )

    assert torch.equal(output, found)
    assert torch.equal(torch.stack(losses), torch.stack(split_losses))
    assert_equal(gradients(stages), gradients(expected))
    assert torch.equal(
        split.eval(arg_mbs=[(part,) for part in x.chunk(4)], target_mbs=list(y.chunk(4))),
        whole.eval(x, target=y),
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, x: s.step(x, arg_mbs=[(x,)] * 4), ValueError, "whole or as arg_mbs"),
        (lambda s, x: s.step(y=x, kwarg_mbs=[{}] * 4), ValueError, "not both: got 'y'"),
        (lambda s, x: s.step(target=x, target_mbs=[x] * 4), ValueError, "whole or as target_mbs"),
        (lambda s, x: s.step(arg_mbs=(x,)), TypeError, "arg_mbs must be a list"),
        (lambda s, x: s.step(arg_mbs=[x] * 4), TypeError, "arg_mbs must be a list of tuples"),
        (lambda s, x: s.step(kwarg_mbs=[x] * 4), TypeError, "kwarg_mbs must be a list of dicts"),
        (lambda s, x: s.step(arg_mbs=[(x,)] * 3, target=x), ValueError, "4 microbatches are need"),
        (lambda s, x: s.step(x, target=x, losses=()), TypeError, "losses must be a list"),
    ],
)
def test_calls_that_torch_refuses_are_refused_with_its_types(call, error, message):
    schedule, _ = made(loss_fn=None)

    with pytest.raises(error, match=message) as raised:
        call(schedule, rand(8, 8))
    assert isinstance(raised.value, InputError)


def test_what_torch_calls_a_runtime_error_is_one():
    schedule, _ = made()

    with pytest.raises(RuntimeError, match="target is None"):
        schedule.step(rand(8, 8))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call it outside torch.no_grad"):
        schedule.step(rand(8, 8), target=rand(8, 8))


def test_a_step_without_a_loss_is_inference_and_may_be_called_under_no_grad():
    schedule, _ = made(loss_fn=None)
    x = rand(8, 8)

    with torch.no_grad():
        output = schedule.step(x)

    torch.testing.assert_close(output, schedule.eval(x))


def test_arguments_of_later_versions_are_taken_and_change_no_gradient():
    x, y = rand(8, 8), rand(8, 8, seed=2)
    plain, expected = made()
    given, stages = made(
        max_active_stages=1,
        unshard_lookahead="auto",
        defer_reduce_grad_wait=True,
        max_outstanding_sends=2,
        backward_requires_autograd=True,
    )

    plain.step(x, target=y)
    given.step(x, target=y)

    assert_equal(gradients(stages), gradients(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_outstanding_sends": 0}, "a whole number from 1 up, got 0"),
        ({"max_outstanding_sends": 2, "defer_pp_recv": True}, "needs receives='early', got 'late'"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        made(**options)


def test_a_forward_context_is_around_each_forward_and_the_trial():
    schedule, stages = made()
    seen = []

    @contextmanager
    def context(info):
        seen.append(info)
        yield

    handle = stages[1].register_forward_context(context)
    with pytest.raises(RuntimeError, match="stage 1 has a forward context"):
        stages[1].register_forward_context(context)
    x = rand(8, 8)
    schedule.step(x, target=x)

    trial = PipelineStageInfo(stage_index=1, microbatch_index=0, is_metadata_inference=True)
    forwards = [PipelineStageInfo(stage_index=1, microbatch_index=m) for m in range(4)]
    assert seen == [trial, *forwards]
    handle.remove()
    schedule.step(x, target=x)
    assert len(seen) == 5


def test_a_forward_context_must_not_hide_an_error():
    class Failing(Block):
        def forward(self, x):
            raise ZeroDivisionError

    @contextmanager
    def hides(info):
        with suppress(ZeroDivisionError):
            yield

    schedule, stages = made(module=Failing)
    stages[0].register_forward_context(hides)

    with pytest.raises(InputError, match="context of stage 0 suppressed an exception"):
        schedule.step(rand(8, 8), target=rand(8, 8))


def test_stages_and_schedules_have_the_attributes_that_clients_read():
    schedule, stages = made()

    assert (schedule._n_microbatches, schedule.scale_grads, schedule._num_stages) == (4, True, 4)
    assert schedule.stage_index_to_group_rank == {0: 0, 1: 1, 2: 0, 3: 1}
    assert (schedule.rank, schedule.pp_group_size) == (0, 2)
    assert [stage.has_backward for stage in stages] == [True] * 4
    assert stages[2].stage_index_to_group_rank == {0: 0, 1: 1, 2: 0, 3: 1}
    single, _ = made(ScheduleGPipe)
    assert single._stage is single._stages[0]
    assert single._loss_fn is not None
