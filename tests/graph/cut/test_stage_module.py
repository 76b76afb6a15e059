"""What stages keep of the modules around them: hooks, extra state."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fxpipe import Pipe, SplitError, SplitPoint, pipe_split, pipeline
from fxpipe.graph.markers import annotate_split_points

X = torch.randn(4, 8)
SPEC = {"body.1": SplitPoint.BEGINNING}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def body(model: Net) -> nn.Module:
    return model.body


def root(model: Net) -> nn.Module:
    return model


def whole(model: Net) -> nn.Module:
    return model.head


HOOKS: dict[str, Any] = {
    "collects": lambda part, seen: part.register_forward_hook(
        lambda m, i, o: seen.append(o.detach())
    ),
    "collects inputs": lambda part, seen: part.register_forward_hook(
        lambda m, i, o: seen.append(i[0].detach())
    ),
    "reads values": lambda part, seen: part.register_forward_hook(
        lambda m, i, o: seen.append(o.sum().item())
    ),
    "keyword": lambda part, seen: part.register_forward_hook(
        lambda m, i, k, o: seen.append(len(k)), with_kwargs=True
    ),
    "changes": lambda part, seen: part.register_forward_hook(lambda m, i, o: o * 1.5),
    "in place": lambda part, seen: part.register_forward_hook(lambda m, i, o: o.mul_(2)),
    "parameter": lambda part, seen: part.register_forward_hook(
        lambda m, i, o: o + next(m.parameters()).sum()
    ),
    "before": lambda part, seen: part.register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    "looks before": lambda part, seen: part.register_forward_pre_hook(
        lambda m, i: seen.append(i[0].mean().item())
    ),
    "gradient": lambda part, seen: part.register_forward_hook(
        lambda m, i, o: seen.append(o.register_hook(lambda g: g * 3) is None)
    ),
}


@pytest.mark.parametrize("where", [body, root, whole])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_do_in_stages_what_they_do_in_the_model(kind: str, where: Any) -> None:
    # Hooks on modules that are split used to be left out with a warning, and in a trace no
    # hook ran at all, so one that changed what a leaf returns broke it.
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    seen: dict[nn.Module, list[Any]] = {model: [], plain: []}
    for one, notes in seen.items():
        HOOKS[kind](where(one), notes)

    pipe = pipeline(model, (X,), split_spec=SPEC)

    assert seen[model] == []
    for x in (X, -X):
        found, wanted = pipe(x), plain(x)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
    torch.testing.assert_close(seen[model], seen[plain])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_backward_hooks_on_a_module_that_is_split_are_refused() -> None:
    model = Net()
    model.body.register_full_backward_hook(lambda *_: None)
    model.head.register_full_backward_hook(lambda *_: None)

    with pytest.raises(SplitError, match="backward hooks on modules that are split: body\n"):
        pipeline(model, (X,), split_spec=SPEC)


NAMES = ("graph", "code", "meta", "recompile", "class", "self", "torch", "lambda", "shape_env")


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_module_parameter_buffer_or_input_works(name: str) -> None:
    # Generated code wrote `self.class`, and a stage has a `graph` of its own.
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(8, 8))
            self.inner = nn.Module()
            self.inner.register_parameter(name, nn.Parameter(torch.randn(8)))
            self.head = nn.Linear(8, 8)

        def forward(self, **given: Tensor) -> Tensor:
            x = torch.relu(self._modules[name](given["x"]) + self.inner._parameters[name])
            return self.head(x + given.get(name, x))

    model = Named()
    call = {"x": X} if name == "self" else {"x": X, name: torch.randn(4, 8)}

    pipe = pipeline(model, (), call, split_spec={"head": SplitPoint.BEGINNING})

    torch.testing.assert_close(pipe(**call), model(**call))
    keys = [key for stage in pipe.stages for key in stage.module.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    first = pipe.get_stage_module(0)
    given = {key: call[key] for key in pipe.stages[0].interface.model_inputs}
    torch.testing.assert_close(copy.deepcopy(first)(**given), first(**given))


@pytest.mark.parametrize("home", ["_parameters", "_buffers"])
def test_a_tensor_may_be_called_graph(home: str) -> None:
    class Named(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) + getattr(self, home)["graph"])

    model = Named()
    if home == "_parameters":
        model.register_parameter("graph", nn.Parameter(torch.randn(8)))
    else:
        model.register_buffer("graph", torch.randn(8))

    pipe = pipeline(model, (X,), split_spec=SPEC)

    torch.testing.assert_close(pipe(X), model(X))
    pipe.get_stage_module(1).load_state_dict(pipe.get_stage_module(1).state_dict())


def test_global_hooks_fire_for_whole_modules_only() -> None:
    fired: list[str] = []
    handle = torch_module.register_module_forward_hook(
        lambda part, *_: fired.append(type(part).__name__)
    )
    try:
        with pytest.warns(UserWarning, match="body, the model itself"):
            # The check would run the model, and with it the hooks that are counted here.
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


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(8.0), persistent=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ReadsIds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Ids()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x) + self.embed.ids))


def test_a_buffer_that_is_not_saved_stays_so_beside_its_module() -> None:
    # The stage runs `embed` and reads its buffer: it was registered once more, as one that
    # is saved, in the user's own module.
    model = ReadsIds()
    names = set(model.state_dict())

    pipe = pipeline(model, (X,), split_spec=SPEC)

    assert {name for stage in pipe.stages for name in stage.module.state_dict()} == names
    assert set(model.state_dict()) == names


class Skipping(nn.Module):
    """A buffer, a weight that two stages hold, and a value that passes a stage by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x, scale):
        kept = self.first(x)
        pipe_split()
        x = self.norm(kept)
        pipe_split()
        return self.last(x) + kept * scale


def split():
    torch.manual_seed(0)
    model = Skipping()
    x, scale = torch.randn(6, 4), torch.randn(6, 1)
    return model, pipeline(model, (x,), {"scale": scale}), x, scale


def test_the_state_has_the_names_of_the_model():
    model, pipe, _, _ = split()

    assert isinstance(pipe, nn.Module)
    assert set(pipe.state_dict()) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], value), name
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}


def test_a_state_is_loaded_into_all_stages():
    model, pipe, x, scale = split()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            value.add_(1)

    pipe.load_state_dict(other.state_dict())

    torch.testing.assert_close(pipe.eval()(x, scale=scale), other.eval()(x, scale))
    state = dict(other.state_dict())
    state["first.wait"] = state.pop("first.bias")
    with pytest.raises(RuntimeError, match=r"lacks \['first.bias'\].*unknown \['first.wait'\]"):
        pipe.load_state_dict(state)
    assert pipe.load_state_dict(state, strict=False).missing_keys == ["first.bias"]


def test_a_pipe_moves_as_a_whole():
    model, pipe, x, scale = split()

    moved = pipe.to(torch.float64)

    assert moved is pipe
    expected = copy.deepcopy(model).double()(x.double(), scale.double())
    torch.testing.assert_close(pipe(x.double(), scale=scale.double()), expected)


def test_the_graph_calls_the_stages_and_computes_the_model():
    model, pipe, x, scale = split()

    found = pipe.split_gm

    calls = [node.target for node in found.graph.nodes if node.op == "call_module"]
    assert calls == ["submod_0", "submod_1", "submod_2"]
    torch.testing.assert_close(found.eval()(x, scale), model.eval()(x, scale))


def test_from_tracing_splits_at_the_markers():
    model, _, x, scale = split()

    pipe = Pipe.from_tracing(model, (x,), {"scale": scale})

    assert pipe.num_stages == 3


def test_a_policy_written_for_torch_is_told_what_it_gets():
    model, _, x, scale = split()

    with pytest.raises(SplitError, match="returned a TracedGraph, needed an Assignment"):
        pipeline(model, (x, scale), split_policy=lambda traced: traced)
    with pytest.raises(AttributeError) as raised:
        pipeline(model, (x, scale), split_policy=lambda traced: traced.recompile())
    assert "not an exported GraphModule" in "".join(raised.value.__notes__)


def test_a_module_that_is_not_there_is_an_attribute_error_too():
    model, _, x, scale = split()

    for ask in (
        lambda: pipeline(model, (x, scale), split_spec={"frist": SplitPoint.BEGINNING}),
        lambda: annotate_split_points(model, {"frist": SplitPoint.BEGINNING}),
    ):
        with pytest.raises(AttributeError, match="'frist' is not a submodule"):
            ask()
