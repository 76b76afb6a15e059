"""Starting ranks: what fails is told once, and nothing outlives the call."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fxpipe.cli import app, launch
from fxpipe.cli.launch import RankFailedError, record_failure, run_again
from fxpipe.errors import InputError, RemoteStageError


def test_torchrun_is_killed_if_it_does_not_end_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); "
        "print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setattr(launch, "_PATIENCE", 0.2)

    launch._end(process)

    assert process.returncode == -9
    process.stdout.close()


def test_a_limit_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_TORCHRUN", "import time; time.sleep(600)")

    with pytest.raises(RankFailedError, match=r"not done after 0\.1 s and were ended"):
        run_again(_context("demo"), 2, limit=0.1)


def test_arguments_reach_torchrun_as_they_were_given(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os; os.environ.update(RANK='0', WORLD_SIZE='3')\n"
        "from fxpipe.cli.launch import arguments_of_rank; print(arguments_of_rank())"
    )
    monkeypatch.setattr(launch, "_TORCHRUN", code)

    run_again(_context("train", "a b?c=1&d=2", "--nproc", "3"), 3)

    assert capfd.readouterr().out == "['train', 'a b?c=1&d=2', '--nproc', '3']\n"


def _context(*arguments: str) -> typer.Context:
    context = typer.Context(typer.main.get_command(app))
    context.meta[launch.ARGUMENTS] = list(arguments)
    context.params["debug"] = False
    return context


def test_the_first_cause_is_told_and_the_echoes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPIPE_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    cause = InputError("too few rows")
    cause.add_note("raised on rank 2")
    for rank, error in enumerate([RemoteStageError("rank 2 failed"), cause, cause]):
        monkeypatch.setenv("RANK", str(rank))
        assert record_failure(error)

    failures = launch._failures(tmp_path)

    assert [failure.rank for failure in failures] == [1, 2, 0]
    assert launch._describe(failures, "", False) == "too few rows\nraised on rank 2"
    assert "fxpipe.errors.InputError: too few rows" in launch._describe(failures, "", True)


def test_what_was_not_foreseen_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPIPE_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError as error:
        record_failure(error)

    text = launch._describe(launch._failures(tmp_path), "", False)

    assert text.startswith("rank 1 failed:\nTraceback")
    assert "ZeroDivisionError: mine" in text


def test_a_rank_that_left_no_word_is_told_by_how_it_ended(tmp_path: Path) -> None:
    assert launch._codes(tmp_path, 7) == "torchrun ended with exit code 7"
    (tmp_path / "codes").write_text('{"1": -9, "2": 7}')

    assert launch._describe([], launch._codes(tmp_path, 1), False) == (
        "rank 1 ended with SIGKILL (perhaps memory ran out), rank 2 ended with exit code 7 "
        "and left no message"
    )


def test_no_word_is_left_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXPIPE_RUN_FOLDER", raising=False)

    assert not record_failure(InputError("x"))
