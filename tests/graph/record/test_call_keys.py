"""Equal calls of torch's functions run once, and what is remembered looks like a new run."""

import pytest
import torch
from torch import nn

from fxpipe.graph.record.call_keys import FunctionRuns, module_key
from fxpipe.graph.sandbox.fake import fake_mode
from tests.graph.record import test_example_values


class Counted(FunctionRuns):
    """Counts the functions that really run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def run(self, func, args, kwargs):
        def counted(*args, **kwargs):
            self.count += 1
            return func(*args, **kwargs)

        counted = CALLS.setdefault(func, counted)
        counted.__module__ = "torch"
        return super().run(counted, args, kwargs)


CALLS = {}


@pytest.fixture
def runs():
    CALLS.clear()
    with fake_mode():
        yield Counted()


def spec(tensor):
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


NEW = {
    "relu": (nn.functional.relu, lambda: (torch.randn(2, 3, requires_grad=True),), {}),
    "linear": (nn.functional.linear, lambda: (torch.randn(2, 3), torch.randn(4, 3)), {}),
    "transposed": (torch.add, lambda: (torch.randn(3, 2).t(), 1), {"alpha": 2}),
    "layer_norm": (nn.functional.layer_norm, lambda: (torch.randn(2, 4), (4,)), {}),
    "topk": (lambda x: tuple(torch.topk(x, 2)), lambda: (torch.randn(2, 4),), {}),
}


@pytest.mark.parametrize("name", NEW)
def test_equal_calls_run_once(runs, name):
    func, make, kwargs = NEW[name]
    first = runs.run(func, make(), kwargs)
    again = runs.run(func, make(), kwargs)

    assert runs.count == 1
    pairs = zip(*((v if isinstance(v, tuple) else (v,)) for v in (first, again)), strict=True)
    for one, other in pairs:
        assert spec(one) == spec(other)
        assert one.untyped_storage() is not other.untyped_storage()
        other.add_(1)  # as what was computed may be changed


AGAIN = {
    "a view": (torch.Tensor.t, lambda: (torch.randn(2, 3),)),
    "in place": (torch.Tensor.add_, lambda: (torch.randn(2, 3), 1)),
    "the argument itself": (torch.Tensor.contiguous, lambda: (torch.randn(2, 3),)),
    "a known number": (torch.neg, lambda: (torch.tensor(3),)),
    "no tensor": (torch.zeros, lambda: (2, 3)),
}


@pytest.mark.parametrize("name", AGAIN)
def test_calls_with_an_effect_or_a_value_run_each_time(runs, name):
    func, make = AGAIN[name]
    runs.run(func, make(), {})
    runs.run(func, make(), {})

    assert runs.count == 2


OTHERS = {
    "size": lambda: torch.randn(3, 3),
    "dtype": lambda: torch.randn(2, 3).double(),
    "stride": lambda: torch.randn(3, 2).t(),
    "gradient": lambda: torch.randn(2, 3, requires_grad=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_argument_is_another_call(runs, name):
    runs.run(torch.relu, (torch.randn(2, 3),), {})
    other = OTHERS[name]()

    found = runs.run(torch.relu, (other,), {})

    assert runs.count == 2
    assert spec(found) == spec(torch.relu(other))


def test_without_gradients_is_another_call(runs):
    x = torch.randn(2, 3, requires_grad=True)
    runs.run(torch.relu, (x,), {})
    with torch.no_grad():
        found = runs.run(torch.relu, (x,), {})

    assert not found.requires_grad


def test_what_is_forgotten_runs_again(runs):
    runs.run(torch.relu, (torch.randn(2, 3),), {})
    runs.forget()
    runs.run(torch.relu, (torch.randn(2, 3),), {})

    assert runs.count == 2


IMAGES = {
    "rows": lambda: torch.randn(4, 3),
    "images": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part": lambda: torch.randn(2, 6, 4, 10)[:, ::2, :, ::2],
    "half": lambda: torch.randn(2, 3, 4, 5).half(),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", IMAGES)
def test_a_batch_norm_looks_like_torchs(name, training):
    with fake_mode():
        x = IMAGES[name]()
        ours, theirs = ([torch.ones(3), torch.ones(3)] for _ in range(2))
        weight = torch.ones(3, requires_grad=True)
        found = FunctionRuns().run(
            nn.functional.batch_norm, (x, *ours, weight, None, training), {"eps": 0.1}
        )
        expected = nn.functional.batch_norm(x, *theirs, weight, None, training, eps=0.1)

    assert spec(found) == spec(expected)
    assert [one._version for one in ours] == [one._version for one in theirs]


def test_a_batch_norm_of_another_size_is_torchs_error():
    with fake_mode(), pytest.raises(RuntimeError, match="running_mean"):
        FunctionRuns().run(
            nn.functional.batch_norm, (torch.randn(4, 3), torch.ones(2), torch.ones(2)), {}
        )


class Block(nn.Linear):
    """Defined beside imports of fxpipe, in a file that never splits."""


def test_blocks_are_alike_unless_their_file_may_split():
    assert module_key(Block(2, 2)) == module_key(Block(2, 2))
    assert module_key(Block(2, 2)) != module_key(Block(2, 3))
    parts = [test_example_values.TwoParts() for _ in range(2)]
    assert module_key(parts[0]) != module_key(parts[1])
