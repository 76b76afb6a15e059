"""torchtitan's own `pipeline_llm` trains over fxpipe as over torch, to the last digit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("titan_rank.py")
MAKER = Path(__file__).with_name("titan_later.py")
LATER = Path(sys.prefix) / "torchtitan-0.3.0"  # beside 0.2.2; see the Makefile
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1300)]


SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def printed(package: str, num_ranks: int) -> dict[str, list[str]]:
    """What each schedule printed of its steps, all from one start of the processes."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), str(RANK), package, *SCHEDULES),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    lines = re.findall(r"((?:LOSS|GRAD) (\w+) [\d/]+ [\d.]+) ([\w.]+)", found.stdout)
    home = "fxpipe" if package == "fxpipe" else "torch.distributed.pipelining"
    assert {module for *_, module in lines} == {f"{home}.schedules"}
    return {name: sorted(line for line, kind, _ in lines if kind == name) for name in SCHEDULES}


@pytest.fixture(scope="module", params=[2, 4])
def both(request: pytest.FixtureRequest) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    return printed("torch", request.param), printed("fxpipe", request.param)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_are_those_of_torch(schedule, both):
    expected, found = both

    assert len([line for line in expected[schedule] if line.startswith("LOSS")]) == 3
    assert found[schedule] == expected[schedule]


def made(package: str) -> dict[str, list[str]]:
    """Home, number of local stages and order of what torchtitan 0.3.0 makes of each schedule."""
    command = [sys.executable, "-W", "ignore", str(MAKER), str(LATER), package, *SCHEDULES]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    lines = re.findall(r"^MADE (\w+) ([\w.]+) (\d) (.*)$", found.stdout, re.MULTILINE)
    return {name: rest for name, *rest in lines}


def test_a_later_version_imports_and_makes_its_schedules():
    theirs, ours = made("torch"), made("fxpipe")

    assert set(ours) == set(theirs) == set(SCHEDULES)
    for name in SCHEDULES:
        home, stages, order = ours[name]
        assert (home, stages) == ("fxpipe.schedules", "1" if name == "1F1B" else "2")
        if name in ("Interleaved1F1B", "DualPipeV"):  # the others differ: see docs/migration.md
            assert order == theirs[name][2]
