"""`fxpipe doctor`: what it looks at, and what it says when something does not work."""

import pytest

from fxpipe.cli import doctor
from fxpipe.cli.launch import RankFailedError
from tests.cli.run import fxpipe, fxpipe_json


def test_versions_devices_backends_and_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    found = {check["name"]: check for check in fxpipe_json("doctor")}

    assert {name for name, check in found.items() if check["state"] == "failed"} == set()
    assert {"python", "torch", "fxpipe", "typer", "cpu", "accelerator", "gloo", "nccl"} <= set(
        found
    )
    assert found["two processes"]["found"].startswith("gradients of the plain model over gloo")


def test_what_is_missing_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_EXTRAS", {"fxpipe-no-such-package": "a test"})

    text = fxpipe("doctor", "--no-run")

    assert "not installed; needed for a test" in text
    assert "two processes" not in text


def test_processes_that_do_not_work_are_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RankFailedError("no sockets here")

    monkeypatch.setattr(doctor, "run_again", fail)

    text = fxpipe("doctor", code=1)

    assert "no sockets here" in text
