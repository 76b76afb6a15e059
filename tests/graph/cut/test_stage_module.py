"""What stages keep of the modules around them: hooks, extra state."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fxpipe import SplitError, SplitPoint, pipeline

X = torch.randn(4, 8)
SPEC = {"body.1": SplitPoint.BEGINNING}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(
    "register",
    [
        lambda part, hook: part.register_forward_hook(hook),
        lambda part, hook: part.register_forward_pre_hook(hook),
        lambda part, hook: part.register_full_backward_hook(hook),
    ],
    ids=["forward", "pre", "backward"],
)
def test_a_hook_on_a_module_that_is_split_is_warned_of(register: Any) -> None:
    model = Net()
    fired: list[str] = []
    register(model.body, lambda *_: fired.append("body"))
    register(model, lambda *_: fired.append("model"))
    register(model.head, lambda *_: fired.append("head"))

    with pytest.warns(UserWarning, match="split: body, the model itself"):
        pipe = pipeline(model, (X,), split_spec=SPEC)

    assert fired == []
    pipe(X).sum().backward()
    assert fired == ["head"]


def test_the_warning_points_to_the_call() -> None:
    model = Net()
    model.body.register_forward_hook(lambda *_: None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline(model, (X,), split_spec=SPEC)

    assert [warning.filename for warning in caught] == [__file__]


def test_global_hooks_fire_for_whole_modules_only() -> None:
    fired: list[str] = []
    handle = torch_module.register_module_forward_hook(
        lambda part, *_: fired.append(type(part).__name__)
    )
    try:
        with pytest.warns(UserWarning, match="body, the model itself"):
            pipe = pipeline(Net(), (X,), split_spec=SPEC, check=False)
        assert fired == []
        pipe(X)
    finally:
        handle.remove()

    assert fired.count("Linear") == 3
    assert "Sequential" not in fired


def test_hooks_of_torchs_own_machinery_are_part_of_the_forward() -> None:
    model = Net()
    model.body.gain = nn.Parameter(torch.randn(8, 8))
    torch.nn.utils.parametrizations.weight_norm(model.head)

    pipe = pipeline(model, (X,), split_spec=SPEC)

    torch.testing.assert_close(pipe(X), model(X))


class Extra(nn.Sequential):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.version = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self._stored()}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]

    def _stored(self) -> int:
        return self.version


class ExtraRoot(Net):
    step = 7

    def get_extra_state(self) -> int:
        return self.step

    def set_extra_state(self, state: int) -> None:
        self.step = state


def test_extra_state_of_a_module_that_is_split_is_kept() -> None:
    model = ExtraRoot()
    model.body = Extra(*model.body)
    model.step = 9

    pipe = pipeline(model, (X,), split_spec=SPEC)

    states = [stage.module.state_dict() for stage in pipe.stages]
    keys = [key for state in states for key in state]
    assert sorted(keys) == sorted(model.state_dict())
    assert states[0]["_extra_state"] == 9
    assert states[0]["body._extra_state"] == {"version": 3}
    states[0]["body._extra_state"] = {"version": 5}
    pipe.get_stage_module(0).load_state_dict(states[0])
    assert pipe.get_stage_module(0).state_dict()["body._extra_state"] == {"version": 5}
    torch.testing.assert_close(pipe(X), model(X))


def test_extra_state_that_needs_another_stage_is_refused() -> None:
    class Reads(Extra):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": self[1].in_features}

    model = Net()
    model.body = Reads(*model.body)

    with pytest.raises(SplitError, match=r"the extra state of body \(Reads\) cannot be kept"):
        pipeline(model, (X,), split_spec=SPEC)
