"""Run a test function on several real processes, with a time limit, and quickly.

The processes are started once per pytest process and kept, because importing torch
takes longer than most tests; all are forked from one that has imported it. Each call
gives them a fresh process group, of gloo or of an emulated backend. Its store lives in the pytest
process: in a rank it would end with the first rank that is done, while others still connect
(they saw "connection closed by peer"). A process that dies or does not answer in time is
replaced; the test that caused it fails and says so.

    results = run_on_ranks(2, body, "1F1B")      # body(rank, "1F1B") on each rank
"""

import atexit
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.backends import nccl_like

__all__ = ["IMPORTED_ONCE", "RankFailedError", "answers_of_ranks", "close_pipe", "run_on_ranks"]

LIMIT = 150.0
_MANY_THREADS = 20
STARTING = 280.0  # generous: the machine may be busy


class RankFailedError(AssertionError):
    """A rank raised, died or did not come back."""


def run_on_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *args: Any,
    limit: float = LIMIT,
    backend: str = "gloo",
    holds_store: bool = False,
) -> list[Any]:
    """What `body(rank, *args)` returns on each of `num_ranks` processes.

    `body` must be a function of a test module. Raises RankFailedError with the
    traceback of every rank that failed.
    """
    answers = answers_of_ranks(
        num_ranks, body, *args, limit=limit, backend=backend, holds_store=holds_store
    )
    failed = [f"--- rank {rank}: {text}" for rank, (is_ok, text) in enumerate(answers) if not is_ok]
    if failed:
        raise RankFailedError("\n".join(failed))
    return [value for _, value in answers]


def answers_of_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *args: Any,
    limit: float = LIMIT,
    backend: str = "gloo",
    holds_store: bool = False,
) -> list[tuple[bool, Any]]:
    """For each rank whether `body` came back, and what it returned or what happened to it.

    With `holds_store` the store of the group lives in rank 0, as under torchrun on one host.
    """
    workers = _workers(num_ranks)
    store = None if holds_store else dist.TCPStore("127.0.0.1", 0, is_master=True)
    port = _free_port() if store is None else store.port
    name = (body.__module__, body.__qualname__)
    for rank, (_, pipe) in enumerate(workers):
        pipe.send((name, args, rank, num_ranks, port, backend, holds_store))
    deadline = time.monotonic() + limit
    answers = [_answer(process, pipe, deadline, limit) for process, pipe in workers]
    for place, (is_ok, text) in enumerate(answers):
        if not is_ok and text.startswith("did not"):
            process, pipe = _POOL[place]
            if process.is_alive():
                _show_stacks(process)
            pipe.close()
            process.kill()
            process.join(5)
    del store  # not before all are done
    return answers


def _answer(process: Any, pipe: Connection, deadline: float, limit: float) -> tuple[bool, Any]:
    while True:
        is_late = time.monotonic() > deadline  # of a late rank the answer may still be there
        # A child of a rank that died may still hold its end of the pipe.
        is_dead = process.exitcode is not None
        if pipe.poll(0.0 if is_dead else 0.05):
            try:
                answer: tuple[bool, Any] = pipe.recv()
                return answer
            except (EOFError, ConnectionResetError):
                process.join(5)
                is_dead = True
        if is_dead:
            return False, f"did not survive: exit code {process.exitcode}"
        if is_late:
            return False, f"did not come back within {limit:g} s"


def _show_stacks(process: Any) -> None:
    """Where a process hangs, on its standard error."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)


_POOL: list[tuple[Any, Connection]] = []
IMPORTED_ONCE = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.export",
    "fxpipe",
    "fxpipe.schedules",
    "fxpipe.graph.pipe",
]


def _workers(num_ranks: int) -> list[tuple[Any, Connection]]:
    for place, (process, pipe) in enumerate(_POOL):
        if not process.is_alive():
            pipe.close()
            _POOL[place] = _start()
    while len(_POOL) < num_ranks:
        _POOL.append(_start())
    return _POOL[:num_ranks]


def _start() -> tuple[Any, Connection]:
    # One process imports torch, and every rank is forked from that.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    assert here.poll(STARTING) and here.recv() == "ready", "a rank did not start"
    return process, here


@atexit.register
def stop_ranks() -> None:
    """End the processes that tests share; the next test starts new ones."""
    for process, pipe in _POOL:
        pipe.close()
        process.kill()
        process.join(5)
    _POOL.clear()


_PIPES: list[Connection] = []


def close_pipe() -> None:
    """In a child that a rank has forked: this end of the pipe is not the child's."""
    for pipe in _PIPES:
        pipe.close()


def _serve(pipe: Connection) -> None:
    _PIPES.append(pipe)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.10, of its own
    pipe.send("ready")
    while True:
        try:
            (module, qualname), args, *place = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _call(module, qualname, args, *place)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _call(
    module: str,
    qualname: str,
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    backend: str,
    holds_store: bool,
) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    body = importlib.import_module(module)
    for part in qualname.split("."):
        body = getattr(body, part)
    torch.manual_seed(0)
    if backend != "gloo":
        nccl_like.register()
    timeout = datetime.timedelta(seconds=LIMIT)
    is_master = holds_store and rank == 0
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    nccl_like.bind(backend)
    del store
    try:
        return body(rank, *args)
    finally:
        dist.destroy_process_group()
        nccl_like.instances()  # or this process keeps their threads for ever
        if threading.active_count() > _MANY_THREADS:  # of schedules that nobody has collected yet
            gc.collect()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
