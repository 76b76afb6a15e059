"""Compare the peak of tensor memory in a training step with torch.distributed.pipelining.

    python -m benchmarks.step_memory

Both packages run the same modules under the same schedule on two gloo processes. Every
storage that an operation makes is counted from its making to its end, from the
construction of the stages on, so that buffers kept between steps count too. Modules,
gradients and inputs are among them, and are the same for both.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ports import free_port, join
from benchmarks.step_overhead import SCHEDULES, make


class LiveBytes(TorchDispatchMode):
    """How many bytes of storages made under the mode are alive, and were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for key in [key for key, (found, _) in self._alive.items() if found.expired()]:
            del self._alive[key]
        for storage in _storages(output):
            if storage._cdata not in given:  # a view of what was there before is nothing new
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return output


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors]


def peak(package: Any, schedule: str, rank: int, options: argparse.Namespace) -> float:
    """The larger of both ranks' peaks, in MB."""
    with LiveBytes() as live:
        step = make(package, schedule, rank, options)
        for _ in range(2):
            step()
        live.peak = 0
        step()
    found = torch.tensor([live.peak])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item() / 1e6


def run(rank: int, port: int, options: argparse.Namespace) -> None:
    join(rank, port)
    from torch.distributed import pipelining as peer

    import fxpipe

    if rank == 0:
        print(f"{'schedule':24} {'torch MB':>9} {'fxpipe MB':>10} {'ratio':>6}")
    for schedule in options.schedules:
        theirs = peak(peer, schedule, rank, options)
        ours = peak(fxpipe, schedule, rank, options)
        if rank == 0:
            print(f"{schedule:24} {theirs:9.2f} {ours:10.2f} {ours / theirs:6.2f}", flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    options = parser.parse_args()
    options.width, options.layers, options.rows, options.alone = 256, 3, 64, False
    torch.multiprocessing.spawn(run, (free_port(), options), nprocs=2)


if __name__ == "__main__":
    main()
