"""A script under torchrun as its reader starts it, with a time limit and no process left behind."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["torchrun"]

ROOT = Path(__file__).parents[1]
LIMIT = 400  # seconds; a busy machine takes minutes to start four processes
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # what docs/guide.md says of restarts


def torchrun(folder: Path, ranks: int, script: Path, *args: str, restarts: int = 0) -> str:
    """What the script prints on that many ranks; it must succeed."""
    how = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    chosen = FRESH_STORE if restarts else {}
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *how, str(script), *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **chosen},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()  # the ranks are in sessions of their own: only torchrun ends them
    assert process.returncode == 0, errors[-6000:]
    return said
