"""Every model keeps the protocol, runs fast, and splits without a difference."""

import copy

import pytest
import torch

import models
from fxpipe import pipeline
from models import moe
from tests.parity import assert_parity, build_split

BIGGER = {
    "gpt": {"length": 11},
    "llama": {"length": 11},
    "encoder_decoder": {"length": 11, "decoder_length": 4},
    "moe": {"length": 11},
}


@pytest.fixture(params=models.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_module_keeps_the_protocol(name):
    module = models.load(name)

    assert module.__doc__ and "difficulty" in module.__doc__
    assert set(module.SPLIT) == {2, 4}
    for attribute in ("build", "example_inputs", "example_target", "loss_fn", "Sizes"):
        assert attribute in module.__all__


def test_same_seed_gives_the_same_model_and_inputs(name):
    module = models.load(name)

    first, second = module.build(seed=3).state_dict(), module.build(seed=3).state_dict()

    assert all(torch.equal(first[key], second[key]) for key in first)
    torch.testing.assert_close(
        module.example_inputs(2, seed=5), module.example_inputs(2, seed=5), rtol=0, atol=0
    )


def test_loss_reaches_every_parameter(name):
    module = models.load(name)
    model = module.build()
    args, kwargs = module.example_inputs(8)

    module.loss_fn(model(*args, **kwargs), module.example_target(8)).backward()

    assert [key for key, value in model.named_parameters() if value.grad is None] == []


def test_loss_is_a_mean_over_rows(name):
    # Schedules weight microbatches by rows, so the loss of a batch must be the mean
    # of the losses of its parts. BatchNorm mixes rows in training; eval does not.
    module = models.load(name)
    model = module.build().double().eval()
    args, kwargs = module.example_inputs(4, dtype=torch.float64)
    target = module.example_target(4, dtype=torch.float64)

    whole = module.loss_fn(model(*args, **kwargs), target)
    halves = [
        module.loss_fn(
            model(*(a[rows] for a in args), **{key: a[rows] for key, a in kwargs.items()}),
            target[rows],
        )
        for rows in (slice(0, 2), slice(2, 4))
    ]

    torch.testing.assert_close(whole, torch.stack(halves).mean())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_split_model_equals_the_plain_one(name, num_stages, training):
    module = models.load(name)
    model, spec = build_split(name, num_stages)
    model.double().train(training)
    plain = copy.deepcopy(model)
    args, kwargs = module.example_inputs(2, dtype=torch.float64)

    pipe = pipeline(model, args, kwargs, split_spec=spec)

    assert pipe.num_stages == num_stages
    for batch_size, seed in ((2, 0), (2, 1), (5, 2)):
        inputs = module.example_inputs(batch_size, seed=seed, dtype=torch.float64)
        assert_parity(plain, pipe, *inputs, tolerance=1e-9)


@pytest.mark.parametrize("name", BIGGER)
def test_split_model_takes_another_length(name):
    module = models.load(name)
    model, spec = build_split(name, 2)
    model.double()
    plain = copy.deepcopy(model)
    args, kwargs = module.example_inputs(2, dtype=torch.float64)

    pipe = pipeline(model, args, kwargs, split_spec=spec)

    inputs = module.example_inputs(3, seed=4, dtype=torch.float64, **BIGGER[name])
    assert_parity(plain, pipe, *inputs, tolerance=1e-9)


def test_dropout_follows_train_and_eval_after_the_split():
    module = models.load("gpt")
    model, spec = build_split("gpt", 2, dropout=0.3)
    plain = copy.deepcopy(model)
    args, kwargs = module.example_inputs(2)

    pipe = pipeline(model, args, kwargs, split_spec=spec)

    for training in (True, False, True):
        plain.train(training)
        for stage in pipe.stages:
            stage.module.train(training)
        assert_parity(plain, pipe, args, kwargs)


def test_moe_reports_one_balance_loss_per_block():
    model = moe.build(layers=3, balance=0.5)
    args, _ = moe.example_inputs(2)

    output, balance = moe.collect_balance(model, *args)

    # A perfectly even router gives each block 1.0 times its weight.
    assert output.shape == (2, 8, 64)
    assert balance.requires_grad
    assert 1.0 < balance.item() < 3.0


def test_moe_skips_an_expert_without_tokens():
    model = moe.build(experts=16, active=1, layers=1)
    args, _ = moe.example_inputs(1, length=2)

    model(*args).sum().backward()

    unused = [key for key, value in model.named_parameters() if value.grad is None]
    assert len(unused) >= 14 * 4


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match="unknown model 'bert'; there are gpt, llama"):
        models.load("bert")


def test_split_for_another_number_of_stages_is_refused():
    with pytest.raises(ValueError, match=r"default splits for \[2, 4\] stages, not for 3"):
        models.split_spec(models.load("gpt"), 3)
