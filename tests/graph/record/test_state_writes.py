"""Buffers that the forward changes end up as after a run of the plain model."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpipe import SplitError, SplitPoint, TraceError, pipe_split, pipeline

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x)


class Reassigned(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        self.count = self.count + 1
        y = self.b(x) * self.mean * self.count
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean


class InTraining(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        pipe_split()
        return self.b(x)


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        self.count += 1
        self.mean[0] = 3.0
        return functional.batch_norm(self.b(x), self.mean, torch.ones(8), training=True)


class Swapped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        self.mean, self.other = self.other, self.mean
        return self.b(x) * self.mean


class FromInput(Net):
    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        self.mean = start
        return self.b(x) * self.mean


@pytest.mark.parametrize("kind", [Reassigned, InTraining, InPlace, Swapped])
@pytest.mark.parametrize("training", [True, False])
def test_buffers_and_gradients_follow_the_plain_model(kind: type[Net], training: bool) -> None:
    model = kind().train(training)
    plain = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    pipe = pipeline(model, (X,))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    for _ in range(3):
        x = torch.randn(5, 8)
        found, wanted = pipe(x), plain(x)
        found.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(found, wanted)

    state = {k: v for stage in pipe.stages for k, v in stage.module.state_dict().items()}
    torch.testing.assert_close(state, dict(plain.state_dict()))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_a_buffer_may_become_an_input() -> None:
    model = FromInput()
    pipe = pipeline(model, (X, torch.zeros(8)), dynamic_shapes={"x": {0: "batch"}})
    start = torch.randn(8)

    pipe(X, start)

    assert torch.equal(pipe.get_stage_module(1).mean, start)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Grows(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            self.mean = torch.cat([self.mean, self.mean])
            return self.b(x)

    model = Grows()
    with pytest.raises(TraceError, match=r"replaces the buffer 'mean' \(torch.float32\[8\]\) by"):
        pipeline(model, (X,))
    assert model.mean.shape == (8,)


def test_a_tensor_that_is_no_buffer_is_refused_if_it_is_read() -> None:
    class Cache(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            self.cache = self.cache + 1
            return self.b(x) + self.cache

    with pytest.raises(TraceError, match="replaces the tensor 'cache'"):
        pipeline(Cache(), (X,))


def test_a_changed_number_is_left_on_the_model() -> None:
    class Counts(Net):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.calls = 5

        def forward(self, x: Tensor) -> Tensor:
            self.calls = x.dim()
            return super().forward(x)

    model = Counts()
    pipe = pipeline(model, (X,))
    assert model.calls == 5

    pipe(X)

    assert model.calls == X.dim()


class ReadLater(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.count


class Shared(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        pipe_split()
        return self.norm(self.b(x))


class Tally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.seen


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Shared(nn.BatchNorm1d(8)), "norm.running_mean"),
        (Shared(nn.BatchNorm1d(8)).eval(), "norm.running_mean"),
        (Shared(Tally()), "norm.seen"),
    ],
    ids=["norm", "norm in evaluation", "own buffer"],
)
def test_a_buffer_of_two_stages_must_not_change(model: nn.Module, name: str) -> None:
    with pytest.raises(SplitError, match=f"'{name}' is changed in stage 0 .*used in stage 1"):
        pipeline(model, (X,))


def test_a_value_read_after_a_change_is_sent() -> None:
    # The later stage is sent the value; it needs no copy of the buffer.
    model = ReadLater()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (X,))

    found = [pipe(X), pipe(X)]

    torch.testing.assert_close(found, [plain(X), plain(X)])


def test_norms_that_keep_no_statistics_are_shared() -> None:
    model = Shared(nn.LayerNorm(8))

    pipe = pipeline(model, (X,))

    torch.testing.assert_close(pipe(X), model(X))


def test_each_stage_has_norms_of_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (X,), split_spec={"1": SplitPoint.BEGINNING})

    torch.testing.assert_close(pipe(X), plain(X))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


class Offsets(Net):
    """Keeps what it computes anew in each run, as the multimodal Qwen models do."""

    offsets: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.level = None, 1

    def forward(self, x: Tensor) -> Tensor:
        if self.offsets is None or x.shape[1] == 8:
            self.offsets = x.detach().mean(1, keepdim=True)
        self.level = self.level if self.level == 3 else 3
        x = self.a(x - self.offsets)
        pipe_split()
        return self.b(x)


class Warming(Net):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs = self.runs + 1
        x = self.a(x) if self.runs < 3 else self.a(x).relu()
        pipe_split()
        return self.b(x)


class Rescaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.is_rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x if self.is_rescaled else 2 * x)
        self.is_rescaled = True
        pipe_split()
        return self.b(x)


def test_state_that_each_run_sets_anew_is_no_reason_to_refuse() -> None:
    model = Offsets()
    plain = copy.deepcopy(model)

    pipe = pipeline(model, (X,))

    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(pipe(x), plain(x))


class Level(nn.Module):
    """Helpers that are methods of a module whose forward nobody calls, as Funnel has them."""

    level: int | None = None

    def begin(self) -> None:
        self.level = 1

    def deepen(self) -> None:
        assert self.level is not None
        self.level *= 2


class Deepening(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pooling = Level()

    def forward(self, x: Tensor) -> Tensor:
        self.pooling.begin()
        x = self.a(x) * self.pooling.level
        self.pooling.deepen()
        pipe_split()
        return self.b(x) * self.pooling.level


@pytest.mark.parametrize("level", [None, 1, 2, 3])
def test_a_run_may_read_what_it_has_set(level: int | None) -> None:
    # Funnel sets its pooling level and multiplies it; the level that it read first was taken for
    # one that the run before had left.
    model = Deepening()
    plain = copy.deepcopy(model)
    model.pooling.level = level

    pipe = pipeline(model, (X,))

    for _ in range(2):
        assert torch.equal(pipe(X), plain(X))
        assert model.pooling.level == plain.pooling.level == 2
        model.pooling.level = 7


@pytest.mark.parametrize("kind", [Warming, Rescaled])
def test_state_that_a_later_run_may_decide_by_is_refused(kind: type[Net]) -> None:
    # A count does the same in the first two runs; only the state it leaves tells of the third.
    with pytest.raises(TraceError, match="for its next run"):
        pipeline(kind(), (X,))


class Chunked(nn.Module):
    """A leaf that decides by the length, in every run anew: it works on whole chunks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        length = x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, -length % 4))
        chunks = x.unflatten(1, (x.shape[1] // 4, 4))
        return self.linear(chunks).flatten(1, 2)[:, :length]


class SetAnew(nn.Module):
    """Keeps something of each run, and settles the length behind the leaf."""

    def __init__(self):
        super().__init__()
        self.offsets = None
        self.register_buffer("table", torch.randn(8, 4))
        self.blocks = nn.ModuleList(Chunked() for _ in range(2))

    def forward(self, x):
        if self.offsets is None or x.dim() == 3:
            self.offsets = x.sum(1)
        return self.blocks[1](self.blocks[0](x) + self.table)


def test_sizes_that_the_first_run_settles_are_no_difference():
    # The second run needs fewer checks of sizes. It was taken for another run, and the state
    # that each run sets anew was refused (Qwen3-VL keeps its offsets).
    model = SetAnew()
    pipe = pipeline(model, (torch.randn(2, 8, 4),), split_spec={"blocks.1": SplitPoint.BEGINNING})
    x = torch.randn(3, 8, 4)

    torch.testing.assert_close(pipe(x), model(x))
