"""torchtitan's own `pipeline_llm` trains over fxpipe as over torch, to the last digit."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

RANK = Path(__file__).with_name("titan_rank.py")
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


def test_a_later_version_imports_and_makes_its_schedule():
    # It has no attention for a CPU, so that nothing of it can be trained here.
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import fxpipe.compat
        fxpipe.compat.install()
        import torch, torchtitan
        from torch import nn
        import torchtitan.experiments.graph_trainer.graph_pp
        from torchtitan.distributed import pipeline_parallel
        assert torchtitan.__file__.startswith(sys.argv[1])
        kind = pipeline_parallel.get_schedule_class("Interleaved1F1B")
        group = fxpipe.LocalGroup(2)
        make = pipeline_parallel.PipelineStage
        stages = [make(nn.Linear(4, 4), i, 4, "cpu", group=group) for i in range(4)]
        schedule = kind(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss, scale_grads=False)
        assert isinstance(schedule, pipeline_parallel._PipelineScheduleRuntime)
        schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
        print(pipeline_parallel.PipelineStage.__module__)
    """
    command = [sys.executable, "-W", "ignore", "-c", dedent(code), str(LATER)]

    found = subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.strip().endswith("fxpipe.stage")
