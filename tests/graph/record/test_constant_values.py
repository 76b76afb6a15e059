"""Random numbers of Python and numpy never become constants of a stage unnoticed."""

import random
from collections.abc import Callable
from random import random as held

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpipe import SplitPoint, TraceError, pipe_split, pipeline


class Net(nn.Module):
    """Skips a layer at random, in code that is split."""

    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.draw, self.rate = draw, rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        return 2 * x if self.draw() < self.rate else self.b(x)


class OnlyInTraining(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        if self.training and self.draw() < self.rate:
            return x
        return self.b(x)


class Noise(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x * self.draw())


X = torch.randn(4, 8)
DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.random(),
    "uniform": lambda: random.uniform(0, 1),
    "held": lambda: held(),
    "gauss": lambda: random.gauss(),
    "numpy": lambda: np.random.random(),
    "numpy rand": lambda: np.random.rand(),
    "numpy array": lambda: np.random.rand(1).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_that_decides_is_an_error_with_the_line(name: str) -> None:
    states = (random.getstate(), np.random.get_state()[1].tobytes(), random.random)

    with pytest.raises(
        TraceError, match=r"draws a random number(.|\n)*test_constant_values\.py:\d+"
    ):
        pipeline(Net(DRAWS[name], 0.5), (X,))

    assert (random.getstate(), np.random.get_state()[1].tobytes(), random.random) == states


@pytest.mark.parametrize("name", ["random", "uniform", "numpy", "numpy rand"])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_of_zero_or_one_decides_nothing(name: str, rate: float) -> None:
    model = Net(DRAWS[name], rate)

    pipe = pipeline(model, (X,))

    torch.testing.assert_close(pipe(X), model(X))


@pytest.mark.parametrize("name", ["random", "gauss"])
def test_a_draw_that_is_used_is_an_error(name: str) -> None:
    with pytest.raises(TraceError, match="draws a random number"):
        pipeline(Noise(DRAWS[name], 0.5), (X,))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_in_training_only_is_an_error_in_training_only(name: str) -> None:
    model = OnlyInTraining(DRAWS[name], 0.5)
    pipe = pipeline(model, (X,))

    with pytest.raises(TraceError, match="draws a random number"):
        pipe(X)
    for stage in pipe.stages:
        stage.module.eval()
    model.eval()

    torch.testing.assert_close(pipe(X), model(X))


def test_modules_that_are_not_split_draw_as_they_like() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.end = Noise(DRAWS["random"], 0.5), nn.Linear(8, 8)
            self.inner.forward = lambda x: x * random.random() + random.gauss()

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.inner(x))

    pipe = pipeline(Whole(), (X,), split_spec={"end": SplitPoint.BEGINNING})

    assert not torch.equal(pipe(X), pipe(X))


def test_torch_draws_anew_in_every_run() -> None:
    class Torch(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            return self.b(x * torch.rand(()) + torch.randn_like(x))

    model = Torch(DRAWS["random"], 0.5)
    pipe = pipeline(model, (X,))

    torch.manual_seed(3)
    found = [pipe(X), pipe(X)]
    torch.manual_seed(3)
    wanted = [model(X), model(X)]

    torch.testing.assert_close(found, wanted)
    assert not torch.equal(*found)
