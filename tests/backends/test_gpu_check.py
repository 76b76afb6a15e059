"""`make gpu-check` works, so that the first person with GPUs gets a report and no traceback."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_report_says_what_was_tried_and_that_all_is_right(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    options = ["--emulated", "--ways", "1", "--schedules", "1F1B", "--steps", "1"]

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *options, "--report", str(report)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = report.read_text().splitlines()
    for what in ("1F1B", "a stage raises", "a rank hangs", "a rank dies"):
        (found,) = [line for line in lines if line.startswith(what)]
        assert "  ok" in found
