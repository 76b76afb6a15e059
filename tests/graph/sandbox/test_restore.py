"""A trace leaves the model and the process as they were, also after an error."""

import collections
import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpipe import TraceError, pipe_split, pipeline
from fxpipe.graph.sandbox.fake import probe
from fxpipe.graph.sandbox.restore import Places, preserved, preserved_values

X = torch.randn(4, 8)


class Busy(nn.Module):
    """Changes everything it can reach."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.log: list[int] = []
        self.seen = {"calls": 0}
        self.kinds = {1}
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        self.seen["calls"] += 1
        self.kinds.add(2)
        self.new = x
        x = self.norm(self.a(x)) + torch.rand(())
        self.a.weight.requires_grad_(False)
        self.b.training = False
        pipe_split()
        if self.fails and x.sum() > 0:
            x = x + 1
        return self.b(x)

    @functools.cached_property
    def scale(self) -> float:
        return 2.0


def state_of(model: nn.Module) -> object:
    return (
        [(sorted(vars(part)), part.training) for part in model.modules()],
        [(id(p), p.requires_grad, p._version) for p in model.parameters()],
        {name: value.tolist() for name, value in model.state_dict().items()},
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        nn.Module.__call__,
        torch.autograd.Function.apply,
    )


def contents_of(model: Busy) -> object:
    return (list(model.log), dict(model.seen), set(model.kinds))


def test_nothing_is_left_of_a_trace() -> None:
    model = Busy()
    before = (state_of(model), contents_of(model))

    with pytest.raises(TraceError, match=r"reads 'seen' .* and changes what is in it"):
        pipeline(model, (X,))

    assert (state_of(model), contents_of(model)) == before


def test_nothing_is_left_of_a_trace_that_failed() -> None:
    model = Busy(fails=True)
    before = (state_of(model), contents_of(model))

    with pytest.raises(TraceError, match="decides"):
        pipeline(model, (X,))

    assert (state_of(model), contents_of(model)) == before


def test_nothing_is_left_of_a_probe() -> None:
    model = Busy()
    fired: list[int] = []
    model.norm.register_forward_hook(lambda *_: fired.append(1))
    before = (state_of(model), contents_of(model))

    output = probe(model, (X,))

    assert output.shape == (4, 8)
    assert (state_of(model), contents_of(model), fired) == (*before, [])


def test_a_probe_of_code_that_needs_values_runs_it_on_made_up_ones() -> None:
    model, x = Busy(fails=True), torch.randn(6, 8)
    before = (state_of(model), contents_of(model))

    output = probe(model, (x,))

    assert output.shape == (6, 8)
    assert (state_of(model), contents_of(model)) == before


def test_objects_keep_their_identity() -> None:
    model = Busy()
    log, seen, weight = model.log, model.seen, model.a.weight

    with preserved(model):
        model(X)
        model.log, model.a.weight = [3], nn.Parameter(torch.zeros(8, 8))

    assert model.log is log
    assert model.seen is seen
    assert model.a.weight is weight
    assert log == []


def test_contents_of_tensors_are_restored_on_demand() -> None:
    model = Busy()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with preserved_values(model):
        model(X)
        with torch.no_grad():
            model.a.weight.zero_()

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def table(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None]


class Helper:
    kept: Tensor | None = None

    def get(self, n: int) -> Tensor:
        if self.kept is None or self.kept.shape[0] < n:
            self.kept = table(n)
        return self.kept[:n]


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    get = Helper.get


class OfTheClass:
    kept: Tensor | None = None
    get = classmethod(Helper.get)


class Listed:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def get(self, n: int) -> Tensor:
        self.kept.append(table(n))
        return self.kept[-1]


KEPT: dict[str, Tensor] = {}


def in_globals(n: int) -> Tensor:
    if "table" not in KEPT or KEPT["table"].shape[0] < n:
        KEPT["table"] = table(n)
    return KEPT["table"][:n]


def in_a_closure() -> Callable[[int], Tensor]:
    kept: Tensor | None = None

    def get(n: int) -> Tensor:
        nonlocal kept
        if kept is None or kept.shape[0] < n:
            kept = table(n)
        return kept[:n]

    return get


def in_a_default(n: int, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    if not kept or kept[0].shape[0] < n:
        kept[:] = [table(n)]
    return kept[0][:n]


def on_a_function(n: int) -> Tensor:
    on_a_function.__dict__.setdefault("kept", table(n))
    return on_a_function.__dict__["kept"][:n]


class Positions(nn.Module):
    def __init__(self, get: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.linear, self.get = nn.Linear(8, 8), get

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.get(x.shape[1])


class Opened(Positions):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        pipe_split()
        return self.linear(x)


class Whole(nn.Module):
    def __init__(self, get: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.first, self.last = Positions(get), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pipe_split()
        return self.last(x)


CACHES: dict[str, Callable[[], Callable[[int], Tensor]]] = {
    "object": lambda: Helper().get,
    "slots": lambda: Slotted().get,
    "class": lambda: OfTheClass.get,
    "list": lambda: Listed().get,
    "global": lambda: in_globals,
    "closure": in_a_closure,
    "default": lambda: in_a_default,
    "function": lambda: on_a_function,
    "lru_cache": lambda: functools.lru_cache(table),
}


@pytest.mark.parametrize("kind", [Opened, Whole])
@pytest.mark.parametrize("cache", CACHES)
def test_no_fake_tensor_stays_in_a_cache(cache: str, kind: type[nn.Module]) -> None:
    # A table in a helper object was fake after the trace, and the plain model failed.
    model = kind(CACHES[cache]())

    pipe = pipeline(model, (torch.randn(2, 6, 8),))

    for length in (6, 6, 9) if (cache, kind) != ("lru_cache", Opened) else (6, 6):
        if cache == "function":
            on_a_function.__dict__.clear()
        x = torch.randn(2, length, 8)
        found = pipe(x)
        wanted = model(x)
        assert type(wanted) is Tensor
        torch.testing.assert_close(found, wanted)


class Counting(collections.OrderedDict[str, int]):
    """A dict whose own methods say something else than what it holds."""

    def items(self):  # type: ignore[no-untyped-def]
        return ()


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, Counting])
def test_dicts_of_every_kind_are_put_back(kind: type[dict[str, int]]) -> None:
    # Methods of dict broke the hooks of modules, which are in an OrderedDict: the next
    # iteration over them raised a KeyError.
    module = nn.Module()
    module.kept = kind(b=1, a=2)
    places = Places(module)
    module.kept["c"] = 3
    del module.kept["b"]

    places.restore()

    assert list(module.kept) == ["b", "a"]
    assert [module.kept[name] for name in module.kept] == [1, 2]
