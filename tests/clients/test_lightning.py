"""Lightning's Trainer fits a pipeline on two processes, saves it and goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("lightning_rank.py")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


def test_losses_are_the_plain_models_also_after_a_restart(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(RANK), str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    (line,) = (text for text in found.stdout.splitlines() if text.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))

    assert result["whole"] == pytest.approx(result["plain"], abs=1e-6)
    assert result["resumed"] == result["whole"]
    assert 0 < result["validation"] < 10
