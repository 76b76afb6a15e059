"""Run this command again on several processes of this machine, by torchrun.

In:  the arguments that the command was given, and a number of ranks.
Out: nothing, or a `RankFailedError` with the first thing that went wrong.

Under torchrun the command finds that it is a rank (`is_rank`) and does its part; results
are printed by the ranks themselves. What goes wrong on a rank it writes to a folder, since
on a failure most ranks know only that another one failed, and one message is enough.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from fxpipe.errors import FxpipeError, RemoteStageError

__all__ = [
    "ARGUMENTS",
    "NO_NUMPY",
    "RankFailedError",
    "arguments_of_rank",
    "is_rank",
    "record_failure",
    "run_again",
]

ARGUMENTS = "fxpipe.arguments"
"""Where a context keeps the arguments of the whole command."""

NO_NUMPY = "Failed to initialize NumPy"
"""What torch warns of on import; nothing here needs numpy."""

_FOLDER = "FXPIPE_RUN_FOLDER"
_ARGUMENTS = "FXPIPE_RUN_ARGUMENTS"
_PATIENCE = 20.0

# torchrun without its own report of a failure, which a rank's message says better.
_TORCHRUN = f"""
import json, logging, os, pathlib, sys, warnings
warnings.filterwarnings("ignore", "{NO_NUMPY}")
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
logging.disable(logging.ERROR)
try:
    main(sys.argv[1:])
except ChildFailedError as error:
    codes = {{rank: failure.exitcode for rank, failure in error.failures.items()}}
    pathlib.Path(os.environ["FXPIPE_RUN_FOLDER"], "codes").write_text(json.dumps(codes))
    sys.exit(1)
"""


class RankFailedError(FxpipeError):
    """A rank failed; the message is its message, with the traceback if it was not foreseen."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank wrote down before it ended."""

    rank: int
    message: str
    trace: str
    is_foreseen: bool
    is_elsewhere: bool


def is_rank() -> bool:
    """Whether this process was started as one of several, by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def arguments_of_rank() -> list[str] | None:
    """What this rank was told to run, if `run_again` started it."""
    given = os.environ.get(_ARGUMENTS)
    return json.loads(given) if given is not None and is_rank() else None


def run_again(context: typer.Context, num_ranks: int, *, limit: float | None = None) -> None:
    """Run the command of `context` on `num_ranks` new processes and wait for all of them.

    After `limit` seconds they are ended and the run has failed. `--debug` shows the traceback
    of foreseen errors as well.

    Raises:
        RankFailedError: a rank failed, or the limit was reached.
    """
    root = context.find_root()
    arguments: Sequence[str] = root.meta[ARGUMENTS]
    with tempfile.TemporaryDirectory(prefix="fxpipe-") as folder:
        command = [
            *(sys.executable, "-c", _TORCHRUN),
            *("--nnodes", "1", "--nproc-per-node", str(num_ranks)),
            *("--master-addr", "127.0.0.1", "--master-port", str(_free_port())),
            *("-m", "fxpipe"),
        ]
        process = subprocess.Popen(command, env=_environment(arguments, num_ranks, folder))
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        if code == 0:
            return
        failures = _failures(Path(folder))
        if code is None and not failures:
            raise RankFailedError(f"the ranks were not done after {limit:g} s and were ended")
        raise RankFailedError(
            _describe(failures, _codes(Path(folder), code or 0), bool(root.params["debug"]))
        )


def record_failure(error: BaseException) -> bool:
    """Leave word of an error for the process that started this rank, if one did."""
    folder = os.environ.get(_FOLDER)
    if folder is None or not is_rank():
        return False
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    failure = Failure(
        rank=int(os.environ["RANK"]),
        message=f"{error}{notes}",
        trace="".join(traceback.format_exception(error)),
        is_foreseen=isinstance(error, FxpipeError),
        is_elsewhere=isinstance(error, RemoteStageError),
    )
    path = Path(folder) / f"rank-{failure.rank}.json"
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    return True


def _end(process: subprocess.Popen[Any]) -> None:
    """End torchrun if it still runs; it ends the ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failures(folder: Path) -> list[Failure]:
    found = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(ValueError, TypeError):
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda failure: (failure.is_elsewhere, failure.rank))


def _codes(folder: Path, code: int) -> str:
    """How the ranks ended, as torchrun saw it."""
    with contextlib.suppress(OSError, ValueError):
        codes = json.loads((folder / "codes").read_text(encoding="utf-8"))
        return ", ".join(f"rank {rank} ended with {_code_text(c)}" for rank, c in codes.items())
    return f"torchrun ended with {_code_text(code)}"


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return name + (" (perhaps memory ran out)" if name == "SIGKILL" else "")


def _describe(failures: Sequence[Failure], ended: str, debug: bool) -> str:
    if not failures:
        return f"{ended} and left no message"
    first = failures[0]
    if first.is_foreseen and not debug:
        return first.message
    return f"rank {first.rank} failed:\n{first.trace}"


def _environment(arguments: Sequence[str], num_ranks: int, folder: str) -> dict[str, str]:
    # torchrun would read arguments that look like its own, such as --nproc.
    environment = {**os.environ, _FOLDER: folder, _ARGUMENTS: json.dumps(arguments)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # All ranks are here: without this gloo looks up the host's name, which laptops often
    # cannot resolve.
    for name in ("lo", "lo0"):
        if any(name == found for _, found in socket.if_nameindex()):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
    return environment


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
