"""`fxpipe train`: in this process, on processes of its own, and with the user's data."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fxpipe.cli import app
from fxpipe.program.generators import get_schedule
from tests.cli.run import fails, fxpipe, fxpipe_json

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(drop), nn.Linear(8, 1)

    def forward(self, x, scale):
        return self.last(self.drop(torch.tanh(self.first(x)) * scale))

def batches(batch_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        x = torch.randn(batch_size, 4, generator=generator)
        yield ((x,), {"scale": torch.ones(batch_size, 1)}), x.sum(1, keepdim=True)

def nothing(batch_size):
    return []

def number(batch_size):
    return 5

def singles(batch_size):
    return [torch.ones(batch_size, 4)]

def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

def example_inputs(batch_size):
    return torch.ones(batch_size, 4)

def example_target(batch_size):
    return torch.ones(batch_size, 4)

def loss_fn(output, target):
    raise ZeroDivisionError("mine")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[str]:
    path, modules = list(sys.path), set(sys.modules)
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    yield str(file)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_all_ranks_in_this_process_give_the_plain_losses_and_gradients(schedule: str) -> None:
    found = fxpipe_json(
        "train", "gpt", "--local", "--compare", "--schedule", schedule,
        "--steps", "3", "--batch", "10", "--dtype", "float64",
    )  # fmt: skip

    assert found["losses"] == pytest.approx(found["plain_losses"], abs=1e-12)
    assert found["gradient_difference"] < 1e-12
    assert len(found["losses"]) == 3
    assert found["num_stages"] == (2 if schedule == "1F1B" else 4)


def test_a_program_of_the_users_own_and_data_of_the_users_own(mine: str, tmp_path: Path) -> None:
    program = tmp_path / "mine.csv"
    program.write_text(get_schedule("1F1B")(2, 2, 3).to_csv())

    text = fxpipe(
        "train", f"{mine}:Net", "--local", "--compare", "--schedule", str(program), "--steps", "5",
        "--data", f"{mine}:batches", "--loss", "torch.nn.functional:mse_loss", "--batch", "7",
        "--split", "last", "--optimizer", "sgd", "--lr", "0.1",
    )  # fmt: skip

    assert "mine: 2 ranks, 2 stages, 3 microbatches" in text
    assert "step    4  loss" in text
    assert "largest gradient difference" in text
    assert "F- forward" in text


def test_dropout_is_named_where_it_spoils_the_comparison(mine: str) -> None:
    result = CliRunner().invoke(
        app,
        ["train", f"{mine}:Net?drop=0.5", "--local", "--compare", "--steps", "1", "--split", "last",
         "--data", f"{mine}:batches", "--loss", "torch.nn.functional:mse_loss"],
    )  # fmt: skip

    assert result.exit_code == 0
    assert "note: 1 dropout modules (drop, ...)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "ForwardOnly"), "ForwardOnly trains nothing"),
        (("--schedule", "-"), "it must be a file"),
        (("--schedule", "none.csv"), "there is no file none.csv"),
        (("--stages", "3"), "1F1B is not defined for these sizes"),
        (("--batch", "3"), "a batch of 3 rows cannot be split into 4 microbatches"),
        (("--optimizer", "Adma"), "torch.optim has no optimizer 'Adma'; it has"),
        (("--data", "{mine}:nothing"), "gave no batch"),
        (("--data", "{mine}:singles"), "each must be a pair (inputs, target)"),
        (("--data", "{mine}:number"), "gave a int; it must be an iterable"),
        (("--loss", "math:pi"), "--loss 'math:pi' is no function"),
        (("--split", "blocks.2,norm"), "makes 3 stages, but 2 are needed"),
    ],
)
def test_refuses(mine: str, arguments: tuple[str, ...], message: str) -> None:
    given = [argument.format(mine=mine) for argument in arguments]

    assert message in fails("train", "gpt", "--local", *given)


def test_a_rank_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    for device, message in (
        ("cuda", "torch sees no accelerator here; try --device cpu"),
        ("abacus", "is no device"),
        ("fpga", "torch sees no accelerator here; try --device cpu"),
    ):
        result = CliRunner().invoke(app, ["train", "gpt", "--device", device])

        assert result.exit_code == 1
        assert message in result.stderr
        assert result.stderr.startswith("rank 0, error:")


def test_two_processes_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    picture = tmp_path / "step.svg"

    fxpipe(
        "train", "gpt", "--nproc", "2", "--steps", "2", "--compare", "--json",
        "--timeline", str(picture),
    )  # fmt: skip

    # The first rank prints, not this process.
    found = json.loads(capfd.readouterr().out)
    assert found["gradient_difference"] < 1e-5
    assert found["losses"] == pytest.approx(found["plain_losses"], abs=1e-5)
    assert "<svg" in picture.read_text()[:200]


def test_an_error_of_the_users_code_on_a_rank_keeps_its_traceback(
    mine: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    message = _failed("train", f"{mine}:build", "--nproc", "1", "--batch", "2")

    assert message.startswith("error: rank 0 failed:\nTraceback")
    assert "ZeroDivisionError: mine" in message
    assert "raised on rank 0 in stage 0, microbatch 0" in message
    assert capfd.readouterr().err == ""
    assert "RANK" not in os.environ


def _failed(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    return result.stderr
