"""torchtitan's own `pipeline_llm` trains over fxpipe as over torch, to the last digit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("titan_rank.py")
pytestmark = pytest.mark.clients


def losses(package: str, schedule: str, num_ranks: int) -> list[str]:
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), str(RANK), package, schedule, "3"),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr[-3000:]
    assert ("fxpipe.schedules" in found.stdout) == (package == "fxpipe")
    return sorted(set(re.findall(r"LOSS \d+ [\d.]+", found.stdout)))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_losses_are_those_of_torch(schedule, num_ranks):
    expected = losses("torch", schedule, num_ranks)

    assert len(expected) == 3
    assert losses("fxpipe", schedule, num_ranks) == expected
