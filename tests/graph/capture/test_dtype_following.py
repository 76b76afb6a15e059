"""Dtypes that code reads off a tensor follow the model; those written down stay."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpipe import Pipe, TraceError, pipe_split, pipeline

COMPUTE = torch.float32
IDS = torch.arange(12).view(3, 4)
DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.float32]


class Net(nn.Module):
    """Collects what its code makes, so that every dtype shows in the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.a(self.embed(ids))
        pipe_split()
        return (self.b(x), *self.others(x))

    def others(self, x: Tensor) -> tuple[Tensor, ...]:
        return ()


class OfParameter(Net):
    def others(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.float().to(self.b.weight.dtype), torch.zeros(3, dtype=self.a.weight.dtype))


class OfTensor(Net):
    def others(self, x: Tensor) -> tuple[Tensor, ...]:
        before = x.dtype
        x = x.to(torch.float32).square()
        return x.to(before), torch.ones(2, dtype=before), x


class Literal(Net):
    def others(self, x: Tensor) -> tuple[Tensor, ...]:
        assert x.dtype.is_floating_point
        return x.to(torch.float32), x.to(COMPUTE), torch.zeros(2, dtype=COMPUTE)


class Limits(Net):
    def others(self, x: Tensor) -> tuple[Tensor, ...]:
        lowest = torch.finfo(x.dtype).min
        mask = torch.tensor([[True, False], [False, False]])
        masked = torch.zeros(2, 2, dtype=x.dtype).masked_fill(mask, lowest)
        return masked, x + torch.finfo(x.dtype).eps, torch.full((2,), -1e4, dtype=x.dtype)


class SentEarly(Net):
    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embed(ids)
        mask = torch.full((4, 4), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
        x = self.a(hidden)
        pipe_split()
        scores = x @ x.transpose(1, 2) + mask
        return (self.b(scores.softmax(-1) @ x),)


class InTraining(Net):
    def others(self, x: Tensor) -> tuple[Tensor, ...]:
        noise = torch.ones(4, 8, dtype=x.dtype if self.training else torch.float32)
        return (x * noise,)


KINDS = [OfParameter, OfTensor, Literal, Limits, SentEarly, InTraining]


def run(pipe: Pipe | nn.Module) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = pipe(IDS)
    sum(tensor.sum().float() for tensor in found).backward()
    return found


def assert_same(kind: type[Net], change: Callable[[nn.Module], object], *, training: bool) -> None:
    model = kind().train(training)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (IDS,))
    change(plain)
    for stage in pipe.stages:
        change(stage.module)

    torch.testing.assert_close(run(pipe), run(plain), rtol=0, atol=0)

    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_later_cast_is_that_of_the_model(
    kind: type[Net], dtype: torch.dtype, training: bool
) -> None:
    if kind is Literal and dtype is torch.float64:
        # It looks at a dtype, and nobody tried whether it does the same with this one.
        with pytest.raises(TraceError, match=r"it is torch\.float64 now"):
            assert_same(kind, lambda module: module.to(dtype), training=training)
        return
    assert_same(kind, lambda module: module.to(dtype), training=training)


@pytest.mark.parametrize("kind", [OfParameter, OfTensor, Literal, Limits, SentEarly])
def test_autocast_after_the_trace_is_that_of_the_model(kind: type[Net]) -> None:
    model = kind()
    pipe = pipeline(model, (IDS,))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(pipe(IDS), model(IDS), rtol=0, atol=0)


def test_a_model_that_does_not_run_in_another_dtype_keeps_its_own() -> None:
    class Strict(Net):
        def others(self, x: Tensor) -> tuple[Tensor, ...]:
            assert x.dtype is torch.float32
            return (torch.ones(2, dtype=x.dtype),)

    assert_same(Strict, lambda module: None, training=True)


def test_the_model_keeps_its_dtypes() -> None:
    model = OfTensor()

    pipeline(model, (IDS,))

    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Looks(nn.Module):
    """Looks at the dtype of a value that autocast changes, and decides or only asserts."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.first, self.last, self.decides = nn.Linear(4, 4), nn.Linear(4, 4), decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        half = x.dtype == torch.bfloat16
        return self.last(x * 0.5 if half and self.decides else x)


def test_what_code_looks_at_is_compared_when_autocast_changes_it() -> None:
    # Traced without autocast and run with it, the branch of the trace was taken in silence.
    pipe = pipeline(Looks(True), (torch.randn(2, 4),), num_stages=2)

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TraceError, match=r"it is torch\.bfloat16 now"),
    ):
        pipe(torch.randn(2, 4))


def test_looking_without_deciding_is_no_reason_to_refuse() -> None:
    model = Looks(False)
    pipe = pipeline(model, (torch.randn(2, 4),), num_stages=2)
    x = torch.randn(2, 4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pipe(x), model(x))


class Branches(Net):
    """Code that goes another way in another precision, by what it looks at."""

    def __init__(self, look: str) -> None:
        super().__init__()
        self.scale, self.look = nn.Parameter(torch.ones(8)), look

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(ids)
        dtype = {
            "embeddings": lambda: x.dtype,
            "what is computed from them": lambda: (x + 1).dtype,
            "a parameter": lambda: self.scale.dtype,
            "the first parameter": lambda: next(self.parameters()).dtype,
            "a part's": lambda: self.b.weight.dtype,
        }[self.look]()
        x = x * 2 if dtype == torch.float32 else x * 3
        x = self.a(x)
        pipe_split()
        return (self.b(x * self.scale),)


@pytest.mark.parametrize(
    "look",
    ["embeddings", "what is computed from them", "a parameter", "the first parameter", "a part's"],
)
def test_a_cast_that_leads_another_way_is_refused(look: str) -> None:
    # Dtypes that only a cast of the whole model changes were not compared: the stages went on
    # the way of the old precision.
    pipe = pipeline(Branches(look), (IDS,))
    pipe(IDS)
    for stage in pipe.stages:
        stage.module.bfloat16()

    with pytest.raises(TraceError, match="looks at the dtype of a value"):
        pipe(IDS)
