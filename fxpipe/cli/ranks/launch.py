"""Start the ranks of a run on this machine and wait for them, whatever happens.

In:  a job for `fxpipe.cli.ranks.rank` (its name and its settings as JSON) and a number of ranks.
Out: nothing, or a `RankFailedError` with the first thing that went wrong.

Ranks print results themselves. What goes wrong they write to a folder, since on every
failure most ranks only know that another one failed, and one message is enough. No rank
outlives the call.
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
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from fxpipe.errors import FxpipeError, RemoteStageError

__all__ = ["RankFailedError", "record_failure", "run_ranks"]

_FOLDER = "FXPIPE_RUN_FOLDER"
_GRACE = 15.0
_PATIENCE = 5.0
_POLL = 0.05


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


def run_ranks(
    job: str,
    settings: str,
    num_ranks: int,
    *,
    torchrun: bool = False,
    limit: float | None = None,
    debug: bool = False,
) -> None:
    """Run a job on `num_ranks` new processes and wait for all of them.

    Args:
        torchrun: let `torch.distributed.run` start them instead of starting them here.
        limit: seconds after which they are ended and the run has failed.
        debug: show the traceback of foreseen errors as well.

    Raises:
        RankFailedError: a rank failed, or the limit was reached.
    """
    with tempfile.TemporaryDirectory(prefix="fxpipe-") as folder:
        arguments = ["-m", "fxpipe.cli.ranks.rank", job, settings]
        environment = _environment(num_ranks, folder)
        with open(Path(folder) / "stderr", "w+", encoding="utf-8") as noise:
            commands = (
                [_torchrun(arguments, num_ranks)]
                if torchrun
                else [[sys.executable, *arguments]] * num_ranks
            )
            started: list[subprocess.Popen[Any]] = []
            with _ending(started):
                for rank, command in enumerate(commands):
                    own = {} if torchrun else _rank_environment(rank, num_ranks)
                    started.append(
                        subprocess.Popen(
                            command,
                            env={**environment, **own},
                            stderr=noise if torchrun else None,
                        )
                    )
                is_in_time = _wait(started, limit)
            codes = [process.returncode for process in started]
            said = _read(noise)
        if is_in_time and not any(codes):
            # torchrun's own words are kept back above; those of a good run are warnings.
            sys.stderr.write(said)
            return
        failures = _failures(Path(folder))
        if not is_in_time and not failures:
            raise RankFailedError(f"the ranks were not done after {limit:g} s and were ended")
        raise RankFailedError(_describe(failures, codes, said, debug))


def record_failure(error: BaseException) -> bool:
    """Leave word of an error for the process that started this rank, if one did."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return False
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    failure = Failure(
        rank=int(os.environ.get("RANK", "0")),
        message=f"{error}{notes}",
        trace="".join(traceback.format_exception(error)),
        is_foreseen=isinstance(error, FxpipeError),
        is_elsewhere=isinstance(error, RemoteStageError),
    )
    path = Path(folder) / f"rank-{failure.rank}.json"
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    return True


def _failures(folder: Path) -> list[Failure]:
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(ValueError, TypeError):
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda failure: (failure.is_elsewhere, failure.rank))


def _describe(failures: Sequence[Failure], codes: Sequence[int], said: str, debug: bool) -> str:
    if failures:
        first = failures[0]
        if first.is_foreseen and not debug:
            return first.message
        return f"rank {first.rank} failed:\n{first.trace}"
    ended = ", ".join(
        f"rank {rank} ended with {_code_text(code)}" for rank, code in enumerate(codes) if code
    )
    return f"{ended} and left no message\n{said}".rstrip()


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return name + (" (perhaps memory ran out)" if name == "SIGKILL" else "")
    return f"signal {-code}"


def _wait(started: Sequence[subprocess.Popen[Any]], limit: float | None) -> bool:
    """Wait until all have ended, or one has failed and the others had time to notice."""
    end = None if limit is None else time.monotonic() + limit
    failed_at: float | None = None
    while any(process.poll() is None for process in started):
        now = time.monotonic()
        if end is not None and now > end:
            return False
        if failed_at is None and any(process.returncode for process in started):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE:
            return True
        time.sleep(_POLL)
    return True


@contextlib.contextmanager
def _ending(started: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """End what was started, also if this process is asked to end."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _exit) if is_main else None
    try:
        yield
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _torchrun(arguments: Sequence[str], num_ranks: int) -> list[str]:
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", "1"),
        *("--nproc-per-node", str(num_ranks)),
        *("--master-addr", "127.0.0.1"),
        *("--master-port", str(_free_port())),
        *arguments,
    ]


def _environment(num_ranks: int, folder: str) -> dict[str, str]:
    environment = {**os.environ, _FOLDER: folder}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # All ranks are here: without this gloo looks up the host's name, which laptops often
    # cannot resolve.
    for name in ("lo", "lo0"):
        if any(name == found for _, found in socket.if_nameindex()):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment["MASTER_PORT"] = str(_free_port())
    return environment


def _rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
