"""Run a test function on several real processes, with a time limit, and quickly.

The processes are started once per pytest process and kept, because importing torch
takes longer than most tests. Each call gives them a fresh gloo process group on a
free port. A process that dies or does not answer in time is replaced; the test that
caused it fails and says so.

    results = run_on_ranks(2, body, "1F1B")      # body(rank, "1F1B") on each rank
"""

import atexit
import datetime
import importlib
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailedError", "run_on_ranks"]

LIMIT = 150.0  # generous: the first call also starts the processes


class RankFailedError(AssertionError):
    """A rank raised, died or did not come back."""


def run_on_ranks(
    num_ranks: int, body: Callable[..., Any], *args: Any, limit: float = LIMIT
) -> list[Any]:
    """What `body(rank, *args)` returns on each of `num_ranks` processes.

    `body` must be a function of a test module. Raises RankFailedError with the
    traceback of every rank that failed.
    """
    workers = _workers(num_ranks)
    port = _free_port()
    name = (body.__module__, body.__qualname__)
    for rank, (_, pipe) in enumerate(workers):
        pipe.send((name, args, rank, num_ranks, port))
    answers, deadline = _collect(workers, limit)
    failed = [f"--- rank {rank}: {text}" for rank, (is_ok, text) in enumerate(answers) if not is_ok]
    if failed:
        if time.monotonic() > deadline or any("did not" in text for text in failed):
            _stop()
        raise RankFailedError("\n".join(failed))
    return [value for _, value in answers]


def _collect(
    workers: list[tuple[Any, Connection]], limit: float
) -> tuple[list[tuple[bool, Any]], float]:
    deadline = time.monotonic() + limit
    answers: list[tuple[bool, Any]] = []
    for process, pipe in workers:
        answer: tuple[bool, Any] = (False, f"did not come back within {limit:g} s")
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                answer = pipe.recv()
            except EOFError:
                process.join(5)
                answer = (False, f"did not survive: exit code {process.exitcode}")
        answers.append(answer)
    return answers, deadline


_POOL: list[tuple[Any, Connection]] = []


def _workers(num_ranks: int) -> list[tuple[Any, Connection]]:
    for place, (process, pipe) in enumerate(_POOL):
        if not process.is_alive():
            pipe.close()
            _POOL[place] = _start()
    while len(_POOL) < num_ranks:
        _POOL.append(_start())
    return _POOL[:num_ranks]


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


@atexit.register
def _stop() -> None:
    for process, pipe in _POOL:
        pipe.close()
        process.kill()
        process.join(5)
    _POOL.clear()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            (module, qualname), args, rank, num_ranks, port = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _call(module, qualname, args, rank, num_ranks, port)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _call(
    module: str, qualname: str, args: tuple[Any, ...], rank: int, num_ranks: int, port: int
) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    body = importlib.import_module(module)
    for part in qualname.split("."):
        body = getattr(body, part)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", rank=rank, world_size=num_ranks, timeout=datetime.timedelta(seconds=LIMIT)
    )
    try:
        return body(rank, *args)
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
