"""One graph behaves as the model does in training and in evaluation."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpipe import pipe_split, pipeline
from tests.parity import assert_parity

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.a(x))
        pipe_split()
        return self.b(x)

    def middle(self, x: Tensor) -> Tensor:
        return x


class Dropout(Net):
    def middle(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training)


class OtherArguments(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x.clamp(-1.0 if self.training else -0.1, 2.0) * (3 if self.training else 4)


class ModuleInTraining(Net):
    def middle(self, x: Tensor) -> Tensor:
        return self.c(x) if self.training else x


class ModuleInEvaluation(Net):
    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            x = torch.relu(self.c(x))
        return x + 1


class OtherOutput(Net):
    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.a(x)
        pipe_split()
        y = self.b(x)
        return y if self.training else y * 2


class InnerFlag(Net):
    """The flag of a submodule differs from the model's, as with frozen parts."""

    def middle(self, x: Tensor) -> Tensor:
        return x * (2 if self.c.training else 3) * (5 if self.training else 7)


KINDS = [Dropout, OtherArguments, ModuleInTraining, ModuleInEvaluation, OtherOutput]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("traced_in_training", [True, False])
def test_both_modes_work_whichever_was_traced(kind: type[Net], traced_in_training: bool) -> None:
    model = kind().train(traced_in_training)
    plain = copy.deepcopy(model)

    pipe = pipeline(model, (X,))

    assert all(part.training is traced_in_training for part in model.modules())
    for training in (True, False, True):
        plain.train(training).zero_grad()
        for stage in pipe.stages:
            stage.module.train(training).zero_grad()
        torch.manual_seed(7)
        wanted = plain(X)
        torch.manual_seed(7)
        found = pipe(X)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_code_that_asks_for_no_flag_is_traced_once(caplog: pytest.LogCaptureFixture) -> None:
    # A counter in the model would not tell: what a trace changes is put back.
    class Flagless(Net):
        def middle(self, x: Tensor) -> Tensor:
            return x

    with caplog.at_level("INFO", logger="fxpipe"):
        pipeline(Flagless(), (X,))

    assert "Flagless ran 1 times" in caplog.text


def wide(training: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([x, x], 1) if training else x


class OtherShape(Net):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = wide(self.training)(self.a(x))
        pipe_split()
        return self.wide(x) if self.training else self.narrow(x)


def test_what_one_mode_sends_is_zeros_in_the_other() -> None:
    model = OtherShape()

    pipe = pipeline(model, (X,))

    assert [str(sent.port) for sent in pipe.interfaces[0].sent] == [
        "a: float32[batch, 8]",
        "cat: float32[batch, 16]",
    ]
    for training in (True, False):
        model.train(training)
        for stage in pipe.stages:
            stage.module.train(training)
        torch.testing.assert_close(pipe(X), model(X))


def test_stages_read_the_flag_of_the_module_whose_code_it_was() -> None:
    model = InnerFlag()
    pipe = pipeline(model, (X,))

    for stage in pipe.stages:
        stage.module.eval()
    model.eval()

    torch.testing.assert_close(pipe(X), model(X))


class PairByMode(nn.Module):
    """Both modes take parts of a pair, which another module makes in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noisy, self.calm = Pair(), Pair()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.noisy(x) if self.training else self.calm(x)
        pipe_split()
        return self.last(left) + right


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@pytest.mark.parametrize("training", [True, False])
def test_parts_of_a_value_that_each_mode_makes_its_own_way(training: bool) -> None:
    # The choice between the two was written behind the parts that are taken of it.
    model = PairByMode().train(training)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4)

    pipe = pipeline(model, (x,))

    assert_parity(plain, pipe, (x,))
