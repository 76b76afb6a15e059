"""Starting ranks: what fails is told once, and nothing outlives the call."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxpipe.cli.ranks import launch
from fxpipe.cli.ranks.launch import record_failure
from fxpipe.errors import InputError, RemoteStageError


def _process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def test_the_others_get_time_to_notice_and_are_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.3)
    started = [_process("raise SystemExit(3)"), _process("import time; time.sleep(600)")]

    with launch._ending(started):
        assert launch._wait(started, None)

    assert [process.returncode for process in started] == [3, -15]


def test_a_process_that_does_not_end_when_asked_is_killed(
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

    with launch._ending([process]):
        pass

    assert process.returncode == -9
    process.stdout.close()


def test_a_limit_ends_everything() -> None:
    started = [_process("import time; time.sleep(600)")]

    with launch._ending(started):
        assert not launch._wait(started, 0.1)

    assert started[0].returncode == -15


def test_ranks_end_when_this_process_is_asked_to() -> None:
    started = [_process("import time; time.sleep(600)")]
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"), launch._ending(started):
        os.kill(os.getpid(), signal.SIGTERM)
        launch._wait(started, 10.0)

    assert started[0].returncode == -15
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_cause_is_told_and_the_echoes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPIPE_RUN_FOLDER", str(tmp_path))
    cause = InputError("too few rows")
    cause.add_note("raised on rank 2")
    for rank, error in enumerate([RemoteStageError("rank 2 failed"), cause, cause]):
        monkeypatch.setenv("RANK", str(rank))
        assert record_failure(error)

    failures = launch._failures(tmp_path)

    assert [failure.rank for failure in failures] == [1, 2, 0]
    assert launch._describe(failures, [1, 1, 1], "", False) == "too few rows\nraised on rank 2"
    assert "fxpipe.errors.InputError: too few rows" in launch._describe(failures, [1], "", True)


def test_what_was_not_foreseen_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPIPE_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError as error:
        record_failure(error)

    text = launch._describe(launch._failures(tmp_path), [0, 1], "", False)

    assert text.startswith("rank 1 failed:\nTraceback")
    assert "ZeroDivisionError: mine" in text


def test_a_rank_that_left_no_word_is_told_by_how_it_ended() -> None:
    text = launch._describe([], [0, -9, 7], "last words", False)

    assert text == (
        "rank 1 ended with SIGKILL (perhaps memory ran out), rank 2 ended with exit code 7 "
        "and left no message\nlast words"
    )


def test_no_word_is_left_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXPIPE_RUN_FOLDER", raising=False)

    assert not record_failure(InputError("x"))


def test_ranks_are_told_who_they_are_and_use_this_machine_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    environment = launch._environment(2, "folder")

    assert "RANK" not in environment
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert environment["MASTER_ADDR"] == os.environ.get("MASTER_ADDR", "127.0.0.1")
    assert launch._rank_environment(1, 2)["WORLD_SIZE"] == "2"
