"""A script on several ranks as its reader starts it, with a time limit and no process left behind.

`torchrun` is the real one. `on_ranks` gives a script the same environment in processes that are
forked from one that has imported torch already, which takes seconds less for each rank.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.ranks import IMPORTED_ONCE

__all__ = ["on_ranks", "torchrun"]

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


def on_ranks(folder: Path, ranks: int, script: Path, *args: str) -> str:
    """The same without torchrun: what the ranks print, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    outputs = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, folder, script, args))
        for rank in range(ranks)
    ]
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = "".join(path.read_text() for path in outputs if path.exists())
    assert [process.exitcode for process in processes] == [0] * ranks, said[-6000:]
    return said


def _rank(
    rank: int, ranks: int, port: int, folder: Path, script: Path, args: tuple[str, ...]
) -> None:
    os.chdir(folder)
    with open(f"rank-{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, ranks, ranks)), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    sys.path.insert(0, str(ROOT))
    sys.argv = [str(script), *args]
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()
