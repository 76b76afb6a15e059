"""Accelerate's `prepare_pippy` infers over fxpipe as over torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("pippy_rank.py")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1300)]


def output(package: str) -> str:
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(RANK), package),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    assert ("CLASS fxpipe.schedules" in found.stdout) == (package == "fxpipe")
    (value,) = re.findall(r"OUTPUT (-?[\d.]+)", found.stdout)
    return value


def test_the_output_is_that_of_torch():
    assert output("fxpipe") == output("torch")
