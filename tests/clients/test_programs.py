"""Small programs written for torch's pipelining find the same with the other import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("program_rank.py")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


def found(package: str) -> dict[str, str]:
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(RANK), package),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(re.findall(r"FOUND (\w+ \d): (.*)", done.stdout))


def test_changing_the_import_is_the_migration():
    expected = found("torch")

    assert len(expected) == 2 * 13
    assert found("fxpipe") == expected
