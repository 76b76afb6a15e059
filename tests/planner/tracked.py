"""Measure which rank holds how many bytes during a real step in one process."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.planner.cost.watch import tensors_in
from fxpipe.program import Action, Kind
from fxpipe.schedules import Schedule

__all__ = ["RankMemory"]


class RankMemory(TorchDispatchMode):
    """Counts storages made while a rank's action runs, from their making to their end.

    with RankMemory(schedule, ignore=state) as memory:
        schedule.step(...)
    memory.peak[rank]
    """

    def __init__(self, schedule: Schedule, ignore: list[torch.Tensor]) -> None:
        super().__init__()
        self._rank_of: Mapping[int, int] = dict(enumerate(schedule.program.placement.stage_to_rank))
        self.peak = [0] * schedule.program.num_ranks
        self._held = [0] * schedule.program.num_ranks
        self._alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._ignored = {t.untyped_storage()._cdata for t in ignore}
        self._rank: int | None = None
        for kind in Kind:
            if kind.is_compute or kind is Kind.OVERLAP:
                schedule.before(kind, self._enter)
                schedule.after(kind, self._leave)

    def _enter(self, action: Action) -> None:
        self._rank = self._rank_of[action.stage]

    def _leave(self, action: Action) -> None:
        self._rank = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._rank is not None:
            for tensor in tensors_in(output):
                self._note(tensor, self._rank)
        return output

    def _note(self, tensor: torch.Tensor, rank: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive and self._alive[key][0].expired():
            self._forget(key)  # another storage at the address of one that is gone
        if key in self._ignored or key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = (StorageWeakRef(storage), rank, size)
        self._held[rank] += size
        if self._held[rank] > self.peak[rank]:
            # Only now does it matter what has ended meanwhile.
            self._sweep()
            self.peak[rank] = max(self.peak[rank], self._held[rank])

    def _sweep(self) -> None:
        for key in [k for k, (ref, _, _) in self._alive.items() if ref.expired()]:
            self._forget(key)

    def _forget(self, key: int) -> None:
        _, rank, size = self._alive.pop(key)
        self._held[rank] -= size
