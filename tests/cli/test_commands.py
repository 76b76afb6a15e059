"""What all commands have in common: help, errors, versions, completion."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fxpipe.cli import app
from fxpipe.cli.schedule import app as schedule_app
from fxpipe.errors import FxpipeError
from fxpipe.program.generators import get_schedule
from tests.cli.run import fails, fxpipe

COMMANDS = [
    (command.name or command.callback.__name__,)  # type: ignore[union-attr]
    for command in app.registered_commands
] + [
    ("schedule", command.name or command.callback.__name__)  # type: ignore[union-attr]
    for command in schedule_app.registered_commands
]


def test_the_commands_that_the_readme_names_are_there() -> None:
    names = {name for name, *_ in COMMANDS}

    assert names >= {"demo", "trace", "draw", "simulate", "schedule", "train", "doctor"}


def _command(names: tuple[str, ...]) -> Any:
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.commands[name]
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_examples_that_the_command_accepts(command: tuple[str, ...]) -> None:
    text = fxpipe(*command, "--help")
    found = _command(command)

    _, title, *lines = found.epilog.split("\n")
    assert title == "Examples:"
    for line in lines:
        assert line in text.splitlines()[-len(lines) :][lines.index(line)]
        words = shlex.split(line.partition("<")[0])
        own = words[words.index("fxpipe") + 1 :]
        assert own[: len(command)] == list(command)
        # Reading the arguments raises if an option or a value is not known.
        found.make_context(command[-1], own[len(command) :])


EXAMPLES = [
    line.strip()
    for command in COMMANDS
    for line in str(_command(command).epilog).partition("Examples:\n")[2].split("\n")
]
ON_RANKS = ("fxpipe demo", "fxpipe doctor", "fxpipe train", "torchrun")
MINE = """
import torch

def batches(batch_size):
    ids = torch.arange(8 * batch_size).view(batch_size, 8) % 64
    yield ids, ids
"""


@pytest.fixture
def folder_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own schedule and own data, as the examples name them."""
    monkeypatch.chdir(tmp_path)
    program = get_schedule("1F1B")(num_ranks=4, num_stages=4, num_microbatches=8)
    for name in ("mine.csv", "my_schedule.csv"):
        Path(name).write_text(program.to_csv())
    Path("mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize("line", [line for line in EXAMPLES if not line.startswith(ON_RANKS)])
def test_every_example_of_the_help_runs(line: str, folder_of_mine: Path) -> None:
    words, _, given = line.partition("<")

    fxpipe(*shlex.split(words)[1:], text=Path(given.strip()).read_text() if given else None)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", [line for line in EXAMPLES if line.startswith(ON_RANKS)])
def test_every_example_on_ranks_runs(line: str, folder_of_mine: Path) -> None:
    module = "torch.distributed.run" if line.startswith("torchrun") else "fxpipe"

    subprocess.run([sys.executable, "-m", module, *shlex.split(line)[1:]], check=True)


def test_help_of_all_commands_is_one_line_each() -> None:
    text = fxpipe("--help")

    for name, *_ in COMMANDS:
        assert f" {name} " in text


def test_no_command_shows_the_help_and_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, [])

    assert result.exit_code == 2
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulat",), "Did you mean 'simulate'"),
        (("simulate", "--rank"), "No such option"),
        (("trace",), "Missing argument"),
        (("schedule", "convert", "a.csv"), "Missing argument"),
    ],
)
def test_wrong_usage_is_exit_code_two(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails(*arguments, code=2)


def test_version() -> None:
    assert fxpipe("--version").startswith("fxpipe 0.")


@pytest.mark.parametrize("position", ["before", "after", "environment"])
def test_debug_shows_the_traceback(position: str) -> None:
    arguments = ["schedule", "show", "nope"]
    if position == "before":
        arguments.insert(0, "--debug")
    elif position == "after":
        arguments.append("--debug")
    environment = {"FXPIPE_DEBUG": "1"} if position == "environment" else {}

    result = CliRunner().invoke(app, arguments, env=environment)

    assert isinstance(result.exception, FxpipeError)


def test_debug_after_two_dashes_is_an_argument() -> None:
    assert "there is no schedule '--debug'" in fails("schedule", "show", "--", "--debug")


def test_an_error_that_was_not_foreseen_keeps_its_type(tmp_path: Any) -> None:
    path = tmp_path / "fails.py"
    path.write_text("def build():\n    raise ZeroDivisionError('mine')\n")

    result = CliRunner().invoke(app, ["trace", f"{path}:build", "--inputs", "math:floor"])

    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_bad_log_level_is_one_message() -> None:
    assert "cannot read FXPIPE_LOG='loud'" in fails("--log", "loud", "schedule", "list")


def test_shells_complete_schedules_and_models() -> None:
    environment = {"_FXPIPE_COMPLETE": "complete_bash", "COMP_CWORD": "3"}

    schedules = CliRunner().invoke(
        app, prog_name="fxpipe", env={**environment, "COMP_WORDS": "fxpipe schedule show ZB"}
    )
    models = CliRunner().invoke(
        app,
        prog_name="fxpipe",
        env={**environment, "COMP_WORDS": "fxpipe trace models/g", "COMP_CWORD": "2"},
    )

    assert schedules.stdout.split() == ["ZBH1", "ZBH2", "ZBVZeroBubble"]
    assert models.stdout.split() == ["models/gpt.py:build"]


def test_the_command_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "fxpipe", "schedule", "show", "nope"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no schedule 'nope'")
    assert done.stderr.count("\n") == 1


def test_without_typer_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(SystemExit, match="1"):
        fxpipe_main()

    assert "needs typer and rich: pip install 'fxpipe[cli]'" in capsys.readouterr().err


def fxpipe_main() -> None:
    from fxpipe.cli import main

    main()


def test_every_option_is_explained() -> None:
    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    todo = list(group.commands.items())
    silent = []
    while todo:
        name, command = todo.pop()
        todo += [(f"{name} {n}", c) for n, c in getattr(command, "commands", {}).items()]
        silent += [f"{name} {p.name}" for p in command.params if not getattr(p, "help", "")]

    assert silent == []


@pytest.mark.parametrize(
    "arguments",
    ["trace gpt --stages 2", "simulate --all -p 2", "simulate 1F1B GPipe -p 2", "schedule list"],
)
def test_tables_fit_a_terminal_of_sixty_columns_and_lose_nothing(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "60"})

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 60
    words = fxpipe(*arguments.split()).split()
    letters = "".join(result.stdout.split())
    assert [word for word in words if len(word) < 8 and word not in letters] == []


@pytest.mark.parametrize(
    "arguments",
    [
        "draw gpt --stages 2 --out",
        "simulate 1F1B --out",
        "report --ranks 2 --out",
        "plan gpt -p 2 --batch-size 8 --report",
        "plan gpt -p 2 --batch-size 8 --what-if-picture",
        "train gpt --local --timeline",
        "demo --out",
    ],
)
def test_output_that_cannot_be_written_is_one_message(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    name = "a.svg" if arguments.endswith("picture") else "a.html"
    message = fails(*arguments.split(), str(tmp_path / "file" / name))

    assert "cannot write" in message
