"""The loop's needs: loss, modes, accumulation, callbacks; and scaled gradients."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpipe import (
    GradScaler,
    InputError,
    LocalGroup,
    Pipeline,
    PipeliningShapeError,
    ProgressBar,
    RemoteStageError,
    aux_loss,
    causal_lm_loss,
)
from tests.distributed.ranks import run_on_ranks


class Balanced(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(super().forward(x))
        aux_loss(out.pow(2).mean(), weight=0.1)
        return out


def model(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    first = Balanced(8, 8) if kind == "aux" else nn.Linear(8, 8)
    layers = [first, nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double()


def rand(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).pow(2).sum(), target.numel()


def built(net: nn.Module, loss: Any = F.mse_loss, **options: Any) -> Pipeline:
    return Pipeline.build(
        net, (rand(2, 8),), loss_fn=loss, n_microbatches=2, group=LocalGroup(2), **options
    )


@pytest.mark.parametrize("kind", ["plain", "pair", "aux"])
def test_accumulated_batches_have_the_gradients_of_one(kind: str) -> None:
    net = model(kind)
    pipe = built(net, weighted if kind == "pair" else F.mse_loss).eval()
    x, y = rand(12, 8), rand(12, 4, seed=2)

    whole = pipe.step(x, target=y)
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    # On top of what is there already.
    parts = pipe.accumulate([(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)])

    torch.testing.assert_close(parts, whole)
    for p, grad in zip(pipe.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad)
    assert pipe.num_steps == 2


def test_a_batch_that_fails_takes_back_those_before_it() -> None:
    pipe = built(model()).eval()
    x, y = rand(4, 8), rand(4, 4, seed=2)
    pipe.step(x, target=y)
    before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]

    with pytest.raises(PipeliningShapeError):
        pipe.accumulate([(x, y), (x[:, :3], y)])
    with pytest.raises(InputError, match="no batch"):
        pipe.accumulate([])

    for p, grad in zip(pipe.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_all_stages_change_their_mode_and_evaluation_puts_it_back() -> None:
    net = model()
    pipe = built(net)
    x, y = rand(4, 8), rand(4, 4, seed=2)
    net[3].eval()

    loss = pipe.evaluate(x, target=y)

    with torch.no_grad():
        torch.testing.assert_close(loss, F.mse_loss(copy.deepcopy(net).eval()(x), y))
    assert net[2].training and not net[3].training
    assert not any(m.training for m in pipe.eval().stages[1].submod.modules())
    torch.testing.assert_close(pipe(x), net(x))
    assert pipe.train().stages[0].submod.training


def test_callbacks_are_told_and_a_bar_is_drawn() -> None:
    told: list[Any] = []
    text = io.StringIO()
    pipe = built(model(), callbacks=[told.append, ProgressBar(2, file=text)])

    losses = [float(pipe.step(rand(4, 8), target=rand(4, 4))) for _ in range(2)]

    assert [(one.step, one.loss) for one in told] == list(enumerate(losses, 1))
    assert text.getvalue().endswith("\n") and "step 2/2 [##############################]" in (
        text.getvalue()
    )


def test_a_split_that_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="makes 3 stages, but 2 ranks with 1 stages each need 2"):
        built(model(), split={"num_stages": 3})


def test_the_loss_of_a_language_model_is_that_of_transformers() -> None:
    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    labels[1, 2:] = -100

    total, weight = causal_lm_loss(logits, labels)

    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(total / weight, wanted)


def overflow(rank: int) -> None:
    """Only the first stage's gradient overflows; both ranks skip the step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    pipe = Pipeline.build(net, (torch.zeros(2, 8),), loss_fn=F.mse_loss, n_microbatches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = GradScaler(pipe, "cpu", init_scale=1024.0)
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    plain = copy.deepcopy(net)
    losses: list[float] = []
    for is_bad in (False, True, False):
        before = [p.detach().clone() for p in pipe.parameters()]
        loss = pipe.step(x, target=y)
        losses.append(float(loss))
        if is_bad and rank == 0:
            pipe.parameters()[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
        assert changed is not is_bad
    assert scaler.get_scale() == pipe.schedule.grad_scale == 512.0
    assert losses[1] == losses[2]
    for number in range(2):
        F.mse_loss(plain(x), y).backward()
        torch.testing.assert_close(losses[number], float(F.mse_loss(plain(x), y).detach()))
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        plain.zero_grad()
    wanted = dict(plain.named_parameters())
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p, wanted[name])


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    run_on_ranks(2, overflow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_plain_models_gradients(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(4, 8), torch.randn(4, 4)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output.float(), target)

    pipe = Pipeline.build(net, (x[:2],), loss_fn=loss_fn, n_microbatches=1, group=LocalGroup(2))
    with torch.autocast("cpu", dtype):
        loss = pipe.step(x, target=y)
        found = [p.grad for p in net.parameters()]
        net.zero_grad()
        plain = loss_fn(net(x), y)
    plain.backward()

    assert torch.equal(loss, plain.detach())
    for grad, p in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


def callback_of_one_rank(rank: int) -> list[str]:
    """The others went on, or waited for a rank that made no call any more."""
    pipe = Pipeline.build(model(), (rand(2, 8),), loss_fn=F.mse_loss, n_microbatches=2)
    pipe.step(rand(4, 8), target=rand(4, 4))

    def log(info: Any) -> None:
        if info.step == 3:
            raise OSError("the disk is full")

    pipe.callbacks = [log] if rank else []
    said = []
    for _ in range(3):
        try:
            pipe.step(rand(4, 8), target=rand(4, 4))
            said.append("")
        except (OSError, RemoteStageError) as error:
            said.append(str(error))
    with pytest.raises(InputError, match="at_once must be at least 1 batch, got 0"):
        next(pipe.schedule.eval_stream([rand(4, 8)], at_once=1 - rank))
    batches = [(rand(4, 8), rand(4, 4))] if rank else [rand(4, 8)]
    with pytest.raises((ValueError, RemoteStageError), match="too many values to unpack"):
        pipe.accumulate(batches)  # type: ignore[arg-type]
    return said


def test_a_wrap_that_returns_nothing_is_named() -> None:
    with pytest.raises(InputError, match="wrap= must return the wrapped module, got NoneType for"):
        built(model(), wrap=lambda module: None)


def test_what_a_callback_raises_on_one_rank_is_raised_on_all() -> None:
    one, other = run_on_ranks(2, callback_of_one_rank)

    assert one == ["", "another rank failed: rank 1: OSError: the disk is full", ""]
    assert other == ["", "the disk is full", ""]
