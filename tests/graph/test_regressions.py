"""Tracing failures that users report elsewhere, each as a test by name."""

import copy
import inspect
import pathlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fxpipe import SplitError, SplitPoint, TraceError, pipe_split, pipeline
from tests.parity import assert_parity

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        name: (type(m), sorted(m.__dict__), m.training, list(m._forward_hooks))
        for name, m in model.named_modules()
    }


def test_repeated_markers_are_one_marker() -> None:
    # Three markers in a row used to leave holes in the numbering of stages.
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            pipe_split()
            pipe_split()
            return self.b(x)

    model = Repeated()
    pipe = pipeline(model, (X,))

    assert [stage.index for stage in pipe.stages] == [0, 1]
    torch.testing.assert_close(pipe(X), model(X))


def test_a_named_module_that_is_never_called_is_an_error() -> None:
    model = Layers()
    model.spare = Block()
    before = snapshot(model)

    with pytest.raises(SplitError, match="spare"):
        pipeline(model, (X,), split_spec={"spare": SplitPoint.BEGINNING})

    assert snapshot(model) == before


def test_an_unknown_name_comes_with_the_closest_ones() -> None:
    with pytest.raises(SplitError, match=r"layers\.2"):
        pipeline(Layers(), (X,), split_spec={"layer.2": SplitPoint.BEGINNING})


def test_spec_and_policy_together_are_refused() -> None:
    with pytest.raises(SplitError, match="both given"):
        pipeline(Layers(), (X,), None, {"layers.2": SplitPoint.END}, lambda traced: traced)  # type: ignore[arg-type,return-value]


class DataDependent(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.sum() > 0:  # depends on data
            x = x * 2
        return x


def test_data_dependent_control_flow_names_file_and_line() -> None:
    model = DataDependent()
    before = snapshot(model)
    lines, start = inspect.getsourcelines(DataDependent.forward)
    line = start + next(i for i, text in enumerate(lines) if "depends on data" in text)

    with pytest.raises(TraceError) as caught:
        pipeline(model, (X,), split_spec={"layers.2": SplitPoint.BEGINNING})

    assert pathlib.Path(__file__).name in str(caught.value)
    assert str(line) in str(caught.value)
    assert snapshot(model) == before


def test_a_reused_module_keeps_its_name_in_every_stage() -> None:
    # Its parameters used to appear under made-up names such as "l@1.weight".
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.middle = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.shared(self.shared(x))
            pipe_split()
            return self.shared(self.middle(x))

    model = Reused()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (X,))

    keys = [set(stage.module.state_dict()) for stage in pipe.stages]
    assert keys[0] | keys[1] == set(model.state_dict())
    assert {location for tied in pipe.tied for location in tied.locations} == {
        (0, "shared.linear.weight"),
        (0, "shared.linear.bias"),
        (1, "shared.linear.weight"),
        (1, "shared.linear.bias"),
    }
    pipe(X).sum().backward()
    plain(X).sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_state_dicts_of_stages_are_slices_of_the_model() -> None:
    class Buffers(Layers):
        def __init__(self) -> None:
            super().__init__(3)
            self.register_buffer("kept", torch.full((8,), 0.5))
            self.register_buffer("scratch", torch.full((8,), 0.25), persistent=False)
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x) + self.scratch
            x = self.layers[1](x) * self.kept
            return self.layers[2](x) * self.gain

    model = Buffers()
    spec = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2)}
    pipe = pipeline(model, (X,), split_spec=spec)

    keys = [key for stage in pipe.stages for key in stage.module.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    owned = [p for stage in pipe.stages for p in stage.module.parameters()]
    assert {id(p) for p in owned} == {id(p) for p in model.parameters()}
    torch.testing.assert_close(pipe(X), model(X))


def test_a_slice_of_a_module_list_and_a_root_buffer() -> None:
    class Sliced(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = layer(x + self.shift)
            pipe_split()
            for layer in self.layers[2:]:
                x = layer(x + self.shift)
            return x

    model = Sliced()
    pipe = pipeline(model, (X,))

    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(X), model(X))


def test_pipeline_can_be_called_twice_and_leaves_the_model_alone() -> None:
    model = Layers()
    calls: list[int] = []
    model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()

    for at in ("layers.1", "layers.3"):
        pipe = pipeline(model, (X,), split_spec={at: SplitPoint.BEGINNING})

    assert calls == []
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    pipe(X)
    assert calls == [1]


class LooksAtValues(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.sum() > 0 else -input)


class AssignsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), LooksAtValues(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count = self.count * 0.9 + 1
        return self.b(self.a(x) * self.count), self.count.clone()


def test_a_buffer_assigned_before_a_leaf_that_looks_at_values_is_written() -> None:
    # The run of the leaf on real tensors put the old buffer back, and the assignment was lost.
    model = AssignsBuffer()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING})

    for _ in range(2):
        assert_parity(plain, pipe, (x,))


class Named(NamedTuple):
    hidden: torch.Tensor
    best: torch.Tensor


class ReturnsNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b(self.a(x))
        return Named(y, y.argmax(-1))


def test_a_hook_on_the_model_sees_an_output_made_of_parts_in_the_last_stage() -> None:
    # A value that is put together belongs to no stage, and the hook that looks at it was put
    # into the first: KeyError.
    seen: list[Any] = []
    model = ReturnsNamed()
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING})
    seen.clear()

    found = pipe(x)

    assert len(seen) == 1
    torch.testing.assert_close(seen[0].hidden, found.hidden)
