"""Start the processes of a benchmark: a port to meet at, and how each joins."""

import os
import socket
import warnings

import torch
import torch.distributed as dist

__all__ = ["free_port", "join"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def join(rank: int, port: int, *, num_ranks: int = 2) -> None:
    """Make this process a rank of a gloo group, with one thread and without warnings."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
