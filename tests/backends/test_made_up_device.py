"""On an accelerator nothing is on the wrong device, and no host waits for the device in a step."""

import os
import subprocess
import sys

from tests.runtime.training import SCHEDULE_NAMES


def test_no_schedule_asks_for_a_value_or_leaves_the_device() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.made_up_device"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    wanted = [f"{name} {loss}" for name in SCHEDULE_NAMES for loss in ("mean", "weighted")]
    assert done.stdout.splitlines() == wanted
