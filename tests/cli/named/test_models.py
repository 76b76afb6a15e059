"""Models by name: how they are built, and where inputs, targets and losses come from."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fxpipe.cli.named.models import ModelRequest, as_inputs, resolve
from fxpipe.errors import InputError

BARE = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self, width):
        super().__init__(width, 2)

ready = nn.Linear(3, 3)
number = 5

def build(width=4):
    return Net(width)

def wrong():
    return "no module"

def rows(batch, length=7, seed=0):
    return torch.full((batch, length), float(seed))
"""


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[str]:
    path, modules = list(sys.path), set(sys.modules)
    file = tmp_path / "bare.py"
    file.write_text(BARE)
    yield str(file)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_model_of_the_repository_brings_all_it_takes_to_train() -> None:
    model = resolve(ModelRequest("models/gpt.py:build?layers=1&length=5", seed=3))

    (ids,), _ = model.inputs(6, seed=1)
    output = model.build()(ids)

    assert output.shape == (6, 5, 64)
    assert model.loss_fn(output, model.target(6, seed=1)).ndim == 0


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = (
        resolve(ModelRequest("models/mlp.py", seed=seed)).build() for seed in (1, 1, 2)
    )

    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


def test_a_model_can_be_built_without_weights_and_in_another_type() -> None:
    model = resolve(ModelRequest("models/gpt.py", dtype="bfloat16"))

    assert {p.device.type for p in model.build(meta=True).parameters()} == {"meta"}
    assert {p.dtype for p in model.build().parameters()} == {torch.bfloat16}


def test_a_class_a_function_and_a_module_are_models(bare: str) -> None:
    for name in ("Net?width=4", "build", "ready"):
        assert isinstance(resolve(ModelRequest(f"{bare}:{name}")).build(), nn.Linear)


def test_functions_are_given_what_they_accept(bare: str) -> None:
    request = ModelRequest(f"{bare}:build", inputs=f"{bare}:rows", target=f"{bare}:rows", seq=2)
    model = resolve(request)

    assert model.inputs(3, seed=4)[0][0].tolist() == [[4.0, 4.0]] * 3
    assert model.target(1, seed=5).tolist() == [[5.0, 5.0]]


def test_a_loss_may_be_any_function() -> None:
    model = resolve(ModelRequest("models/gpt.py", loss="torch.nn.functional:mse_loss"))

    assert model.loss_fn is nn.functional.mse_loss


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{bare}:wrong", "made a str; it must be a torch.nn.Module"),
        ("{bare}:number", "made a int; it must be a torch.nn.Module"),
        ("{bare}:Net", r"needs width; add options to its name: .*:Net\?width="),
        ("{bare}:ready?width=3", "is a module already and takes no options"),
        ("{bare}:build?wdith=3", "was given the options wdith, but .*unexpected keyword"),
        ("models/gpt.py:build?layrs=3", "was given the options layrs, but .*'layrs'"),
        ("models/__init__.py", "has no function 'build'; name the factory"),
    ],
)
def test_building_refuses(bare: str, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(ModelRequest(name.format(bare=bare))).build()


def test_what_is_missing_is_named_with_the_option_that_gives_it(bare: str) -> None:
    model = resolve(ModelRequest(f"{bare}:build"))

    with pytest.raises(InputError, match=r"no function example_inputs\(batch_size\).* --inputs"):
        model.inputs(2)
    with pytest.raises(InputError, match=r"no function example_target\(batch_size\).* --target"):
        model.target(2)
    with pytest.raises(InputError, match=r"no function loss_fn\(output, target\).* --loss"):
        assert model.loss_fn
    with pytest.raises(InputError, match=r"--inputs '.*:number' is no function"):
        resolve(ModelRequest(f"{bare}:build", inputs=f"{bare}:number")).inputs(2)


def test_a_length_that_nobody_takes_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes no length.*\?length="):
        resolve(ModelRequest("models/gpt.py", seq=16)).inputs(2)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        ({"dtype": "int8"}, "dtype is one of float64, float32, bfloat16, float16; got 'int8'"),
        ({"seq": 0}, "the sequence length must be at least 1"),
    ],
)
def test_requests_check_themselves(request_of: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelRequest("models/gpt.py", **request_of)  # type: ignore[arg-type]


def test_inputs_may_be_written_in_several_ways() -> None:
    x = torch.ones(1)

    assert as_inputs(x) == ((x,), {})
    assert as_inputs((x, x)) == ((x, x), {})
    assert as_inputs({"x": x}) == ((), {"x": x})
    assert as_inputs(((x,), {"y": x})) == ((x,), {"y": x})
