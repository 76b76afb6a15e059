"""Let the ranks of a process group meet, before their first call: who is there, and ways to talk.

Each rank leaves a word in the store and waits for those of the others. Then all make a gloo group
of our own, and connect by sockets where they share a host.

A store may outlive its process groups: under torchrun a second `init_process_group` finds what was
written for the first. So a word counts once it repeats the random token of the rank that reads it,
and everything said later stands under the token of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fxpipe.errors import FxpipeError, RemoteStageError
from fxpipe.runtime.control.board import HOLDER, Board
from fxpipe.runtime.control.store import PATIENCE, Store, StoreSilentError
from fxpipe.runtime.wire.failure import Deadline, Failure, described, remote_error
from fxpipe.runtime.wire.sockets import Listener
from fxpipe.torch_inside import default_store

__all__ = ["Met", "connect_gloo", "meet", "name_of", "own_store"]

_DESCRIPTORS = 64  # that must be free for meeting; less for few ranks
_STORES: weakref.WeakKeyDictionary[Any, Store] = weakref.WeakKeyDictionary()
_NAMES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_USED: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_MADE_UP = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Met:
    """What came of a meeting."""

    gloo: Any
    pids: Mapping[int, int]
    """Of the other ranks on this host."""
    sockets: Mapping[int, socket.socket]


def own_store() -> Store:
    """A client of our own of the store of the process groups, one for all boards.

    Connecting can take seconds: the store's library asks for the names of hosts.
    """
    world = dist.group.WORLD
    if world not in _STORES:
        _STORES[world] = Store(_connect_store)
    return _STORES[world]


def _connect_store() -> Any:
    return default_store().clone()


def name_of(group: dist.ProcessGroup) -> str:
    """What all ranks of a group call it.

    torch makes up names of groups that are split from others, as those of a mesh on GPUs, from the
    number of groups that a process is in, so their ranks may know them by different ones. Those are
    called by their ranks, and by their place among the groups of these ranks that were used here.
    """
    if group not in _NAMES:
        try:
            name = str(group.group_name)
        except (RuntimeError, AttributeError):  # of a backend written in Python
            name = ""
        if not name or _MADE_UP.fullmatch(name):
            ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
            used = _USED.setdefault(dist.group.WORLD, Counter())
            used[ranks] += 1
            name = f"{ranks}/{used[ranks]}"
        _NAMES[group] = name
    return _NAMES[group]


def meet(board: Board, deadline: Deadline, is_splitting: bool) -> Met:
    """Meet the other ranks. All of them call this.

    Raises:
        RemoteStageError: a rank does not come before the deadline, or cannot connect; or one is
            still splitting the group for an earlier call.
    """
    _check_descriptors(board)
    listener = _listener(board.size)
    try:
        folder = None if listener is None else listener.folder
        mine = {"host": _host(), "pid": os.getpid(), "folder": folder, "splits": is_splitting}
        found = _hello(board, mine, deadline)
        _check_splits([rank for rank, word in enumerate(found) if word["splits"]])
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


def _check_splits(ranks: Sequence[int]) -> None:
    if ranks:
        raise RemoteStageError(
            f"rank {ranks[0]} still waits for the others to split the process group, in a call "
            "that has failed: the process group cannot be used again: start the job anew",
            rank=ranks[0],
        )


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
    store, rank = board.store, board.rank
    keys = [board.key(f"hello/{peer}") for peer in range(board.size)]
    word = board.word
    word.update(mine)
    words = {rank: word}
    missing, pause = [peer for peer in range(board.size) if peer != rank], 0.001
    store.patience = deadline.left()
    board.doubt = min(board.doubt, deadline.left() / 2)
    try:
        board.come()
        board.greet()
        while missing:
            told = dict(word["heard"])
            for peer in list(missing):
                if store.check([keys[peer]]):
                    found = words[peer] = json.loads(store.get(keys[peer]))
                    word["heard"][str(peer)] = found["token"]
                    if found["heard"].get(str(rank)) == word["token"]:
                        missing.remove(peer)
            if told != word["heard"]:
                board.greet()
                continue
            if not missing:
                break
            board.look_and_raise()
            left = store.patience = deadline.left()
            if left == 0.0:
                store.patience = PATIENCE
                text = f"has not come to its first call within {deadline.seconds:g} s"
                first = Failure(missing[0], "TimeoutError", text, "hang")
                raise remote_error(board.report(first))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    except StoreSilentError as error:
        text = f"{error} {HOLDER}"
        silent = Failure(rank, "TimeoutError", text, "hang")
        raise remote_error(silent) from error
    finally:
        store.patience = PATIENCE
    board.enter(words[0]["token"])
    return [words[peer] for peer in range(board.size)]


def connect_gloo(board: Board, deadline: Deadline) -> Any:
    """Meet the other ranks only to make a gloo group with them. All of them call this.

    Raises:
        RemoteStageError: a rank does not come before the deadline.
    """
    _hello(board, {}, deadline)
    return _make_group(board, deadline)


def _make_group(board: Board, deadline: Deadline) -> Any:
    left = deadline.timeout
    prefix, rank, size = board.key("gloo"), board.rank, board.size

    def make(store: Any) -> Any:
        own = dist.distributed_c10d.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(own, rank, size, timeout=left)

    # By a thread of its own: the other one goes on looking for failures.
    return Store(_connect_store).ask(make, deadline.left(), board.look_and_raise)


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
