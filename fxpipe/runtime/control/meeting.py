"""Let the ranks of a process group meet, before their first call: who is there, and ways to talk.

Each rank leaves a word in the store and waits for those of the others. Then all make a gloo group
of our own, and connect by sockets where they share a host.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fxpipe.errors import FxpipeError
from fxpipe.runtime.control.board import HOLDER, Board
from fxpipe.runtime.control.store import PATIENCE, Store, StoreSilentError
from fxpipe.runtime.wire.failure import Deadline, Failure, described, remote_error
from fxpipe.runtime.wire.sockets import Listener
from fxpipe.torch_inside import default_store

__all__ = ["Met", "connect_store", "meet"]

_DESCRIPTORS = 64  # that must be free for meeting; less for few ranks


@dataclass(frozen=True, slots=True)
class Met:
    """What came of a meeting."""

    gloo: Any
    pids: Mapping[int, int]
    """Of the other ranks on this host."""
    sockets: Mapping[int, socket.socket]


def connect_store() -> Any:
    """A client of our own of the store of the process groups."""
    return default_store().clone()


def meet(board: Board, deadline: Deadline) -> Met:
    """Meet the other ranks. All of them call this.

    Raises:
        RemoteStageError: a rank does not come before the deadline, or cannot connect.
    """
    _check_descriptors(board)
    listener = _listener(board.size)
    try:
        folder = None if listener is None else listener.folder
        found = _hello(board, {"host": _host(), "pid": os.getpid(), "folder": folder}, deadline)
        here = found[board.rank]["host"]
        near = {r: h for r, h in enumerate(found) if h["host"] == here and r != board.rank}
        gloo = _make_group(board, deadline)
        sockets: dict[int, socket.socket] = {}
        if listener is not None and None not in [h["folder"] for h in found]:
            folders = {r: h["folder"] for r, h in near.items()}
            sockets = listener.connect(board.rank, folders, deadline, board.look_and_raise)
    except FxpipeError:
        raise  # which all ranks have been told
    except BaseException as error:
        kind, text = described(error)
        can_connect = not isinstance(error, OSError | RuntimeError)
        text = text if can_connect else f"cannot connect: {text}"
        failure = board.report(Failure(board.rank, kind, text, "broken"))
        if can_connect:
            raise  # an interrupt, say
        raise remote_error(failure) from error
    finally:
        if listener is not None:
            listener.close()
    return Met(gloo, {r: h["pid"] for r, h in near.items()}, sockets)


def _check_descriptors(board: Board) -> None:
    """Without descriptors nothing can connect; the store that is connected can say so."""
    held: list[int] = []
    try:
        wanted = min(4 * (1 + board.size), _DESCRIPTORS)
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(wanted))
    except OSError as error:
        board.store = Store(default_store)
        failure = Failure(board.rank, "OSError", str(error), "broken")
        raise remote_error(board.report(failure)) from error
    finally:
        for one in held:
            os.close(one)


def _hello(board: Board, mine: Mapping[str, Any], deadline: Deadline) -> list[dict[str, Any]]:
    """Tell in the store that this rank is here, and wait for the others."""
    store = board.store
    keys = [board.key(f"hello/{rank}") for rank in range(board.size)]
    missing, pause = list(range(board.size)), 0.001
    store.patience = deadline.left()
    try:
        board.look_and_raise()
        store.set(keys[board.rank], json.dumps(mine))
        while missing := [r for r in missing if not store.check([keys[r]])]:
            board.look_and_raise()
            left = store.patience = deadline.left()
            if left == 0.0:
                store.patience = PATIENCE
                text = f"has not come to its first call within {deadline.seconds:g} s"
                first = Failure(missing[0], "TimeoutError", text, "hang")
                raise remote_error(board.report(first))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [json.loads(store.get(key)) for key in keys]
    except StoreSilentError as error:
        text = f"{error} {HOLDER}"
        silent = Failure(board.rank, "TimeoutError", text, "hang")
        raise remote_error(silent) from error
    finally:
        store.patience = PATIENCE


def _make_group(board: Board, deadline: Deadline) -> Any:
    left = datetime.timedelta(seconds=max(deadline.left(), 0.01))
    prefix, rank, size = board.key("gloo"), board.rank, board.size

    def make(store: Any) -> Any:
        own = dist.distributed_c10d.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(own, rank, size, timeout=left)

    # By a thread of its own: the other one goes on looking for failures.
    return Store(connect_store).ask(make, deadline.left(), board.look_and_raise)


def _host() -> str:
    """What processes that see each other have in common, and no others."""
    parts = [socket.gethostname(), str(os.getuid())]
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
        with open("/proc/sys/kernel/random/boot_id") as boot:
            parts.append(boot.read().strip())
    return " ".join(parts)


def _listener(size: int) -> Listener | None:
    if size == 1 or os.environ.get("FXPIPE_SOCKETS") == "0":
        return None
    try:
        return Listener()
    except OSError:
        return None
