"""`make gpu-check` works, so that the first person with GPUs gets a report and no traceback."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import check_close, merged
from benchmarks.step_memory import LiveBytes


def run(*options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *options],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


@pytest.mark.parametrize(
    "way", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_the_report_says_what_was_tried_and_that_all_is_right(way: int, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.txt"

    done = run(
        *("--emulated", "--ways", str(way), "--schedules", "1F1B", "GPipe", "--steps", "1"),
        *("--report", str(report)),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = report.read_text().splitlines()
    assert lines[-1] == "everything is right"
    for line in [line for line in lines if line.startswith(("1F1B ", "GPipe "))]:
        # The batch was among what the first stage keeps: 1.2 MB were predicted for 721 kB.
        peak, predicted = map(float, re.findall(r"([\d.]+) kB", line))
        assert 0.6 < predicted / peak < 1.1, line
    for what in ("1F1B", "GPipe", "queues", "a stage raises", "a rank hangs", "a rank dies"):
        found = [line for line in lines if line.startswith(what + " ")]
        assert len(found) == way and all("  ok" in line for line in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedules", "Nonsense"], "invalid choice: 'Nonsense'"),
        (["--steps", "0"], "invalid _count value: '0'"),
        (["--ways", "0"], "invalid _count value: '0'"),
        (["--timeout", "0"], "invalid _count value: '0'"),
        (["--report", "/proc/none/report.txt"], "cannot write the report"),
    ],
)
def test_what_cannot_work_is_said_at_once(options: list[str], message: str) -> None:
    # A wrong name was four tables of failures; no way at all was a success; a report that could not
    # be written was lost, after all of the work.
    done = run("--emulated", *options)

    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert message in done.stderr


def row(what: str, result: str = "ok", **more: Any) -> dict[str, Any]:
    return {"what": what, "result": result, "is_right": result == "ok", **more}


def test_what_is_wrong_on_any_rank_is_wrong() -> None:
    # Only rank 0 was heard: wrong gradients elsewhere were "ok".
    wrong = row("1F1B", "FAILED: AssertionError", more=["Traceback"])
    found = merged([[row("GPipe", ms="1"), row("1F1B", ms="2")], [row("GPipe", ms="9"), wrong]])

    assert [(one["what"], one["ms"], one["is_right"]) for one in found] == [
        ("GPipe", "1", True),
        ("1F1B", "2", False),
    ]
    assert found[1]["result"] == "rank 1: FAILED: AssertionError"
    assert found[1]["more"] == ["-- 1F1B, rank 1", "Traceback"]


def test_what_ranks_found_before_a_crash_is_kept() -> None:
    found = merged([[row("GPipe")], [row("GPipe"), row("1F1B")]])

    assert [one["is_right"] for one in found] == [True, False]
    assert found[1]["result"] == "rank 0: FAILED: did not come so far"


def test_torch_s_time_stands_beside_ours() -> None:
    theirs = {"what": "1F1B", "is_right": True, "torch ms": "3"}

    (found,) = merged([[row("1F1B", ms="2"), theirs], [row("1F1B"), theirs]])

    assert (found["result"], found["ms"], found["torch ms"]) == ("ok", "2", "3")


# Runs in each rank before all else.
WRONG = """
import os, sys
if os.environ.get("FOLDER") and os.environ["RANK"] == "1":
    sys.stderr.write("a chatty library\\n" * 10_000)
    from fxpipe.runtime.session import Session
    right = Session.step
    def wrong(self, call):
        outcome = right(self, call)
        for p in self.parameters():
            p.grad.mul_(1.01)
        return outcome
    if "GPipe" in sys.argv:
        Session.step = wrong
"""


def test_a_rank_with_wrong_gradients_is_named_and_the_rest_is_tried(tmp_path: Path) -> None:
    # That rank left a schedule in which the other went on, so all later checks failed as well. What
    # it wrote filled a pipe that nobody read, and it hung.
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    report = tmp_path / "report.txt"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    done = run(
        *("--emulated", "--ways", "1", "--schedules", "GPipe", "--steps", "1"),
        *("--report", str(report)),
        PYTHONPATH=path,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    lines = report.read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("GPipe ")]
    assert "  rank 1: FAILED: AssertionError" in found and "rank 0: " not in found
    (found,) = [line for line in lines if line.startswith("a rank hangs ")]
    assert "  ok" in found
    assert lines[-1] == "SOMETHING IS WRONG"


# A gradient of the first step never leaves.
LOST = """
import os, sys
if os.environ.get("FOLDER") and os.environ["RANK"] == "1" and "--dies" not in sys.argv:
    from fxpipe.runtime.wire.stream_transport import StreamTransport
    right, count = StreamTransport.send, [0]
    def send(self, peer, tensors, lane=0):
        count[0] += 1
        return None if count[0] == 8 else right(self, peer, tensors, lane)
    StreamTransport.send = send
"""


@pytest.mark.full
def test_a_message_that_is_lost_costs_one_schedule(tmp_path: Path) -> None:
    # A step had half an hour, so ranks were killed before they could say who waits for whom.
    (tmp_path / "sitecustomize.py").write_text(LOST)
    report = tmp_path / "report.txt"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    done = run(
        *("--emulated", "--ways", "1", "--schedules", "GPipe", "1F1B", "--steps", "1"),
        *("--timeout", "5", "--report", str(report)),
        PYTHONPATH=path,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    lines = report.read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("GPipe ")]
    assert "no answer from rank" in found
    for what in ("1F1B", "a stage raises", "a rank hangs"):
        (found,) = [line for line in lines if line.startswith(what + " ")]
        assert "  ok" in found


@pytest.mark.full
def test_what_was_found_before_the_check_was_stopped_is_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--emulated", "--schedules", "1F1B"]
    process = subprocess.Popen(
        [*command, "--steps", "1", "--report", str(report)],
        stderr=subprocess.DEVNULL,
        # In the background a shell's commands ignore Ctrl-C, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (report.exists() and "== emulated" in report.read_text()):
        assert process.poll() is None
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)

    assert process.wait(60) != 0
    assert "a stage raises  ok" in report.read_text()
    assert report.read_text().endswith("not finished\n")


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_gradients_are_compared_by_their_own_size(size: float) -> None:
    # All gradients of early stages on eight GPUs were below the tolerance: none of them was "ok".
    right = torch.linspace(-size, size, 9)

    check_close([right * 1.0001], [right])
    with pytest.raises(AssertionError):
        check_close([right * 1.01], [right])


def test_memory_counts_what_is_made_alone() -> None:
    # Views of a step's inputs counted as if it had made the inputs: 1F1B twice what was predicted.
    x = torch.zeros(1000)

    with LiveBytes() as live:
        kept = [part + 1 for part in x.view(10, 100).chunk(2)]

    assert live.peak == sum(part.nbytes for part in kept)
