"""All ranks of a pipeline in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fxpipe.errors import InputError

__all__ = ["LocalGroup", "resolve_group"]


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """Stands in for a process group: all `num_ranks` ranks live in this process.

    A schedule whose stages belong to a local group is given the stages of all
    ranks and runs their actions in turn, deterministically:

        group = LocalGroup(2)
        stages = [pipe.build_stage(i, "cpu", group) for i in range(4)]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss)
    """

    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"a local group needs at least one rank, got {self.num_ranks}")


def resolve_group(
    group: dist.ProcessGroup | LocalGroup | None,
) -> dist.ProcessGroup | LocalGroup:
    """The group a stage belongs to when none, or one, was named."""
    if group is not None:
        return group
    if dist.is_available() and dist.is_initialized():
        world = dist.group.WORLD
        assert world is not None
        return world
    return LocalGroup(1)
