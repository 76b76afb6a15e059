"""Calls that all processes make together, replicas included, or one process by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from fxpipe.runtime.wire.control import Control, LocalControl, control_of
from fxpipe.runtime.wire.failure import Deadline, Failure, described
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group
from fxpipe.training.state import Source, stages_of

__all__ = ["together", "world"]

TIMEOUT = 1800.0  # seconds that ranks wait for each other


@contextlib.contextmanager
def together(name: str, source: Source, *, default_alone: bool) -> Iterator[Control]:
    """One of `control.CALLS`, made by all processes; alone where all stages are in this one.

    The block begins with an exchange, which notices ranks that make different calls.

    `default_alone` says what a plain model is: this process's own affair, or everybody's.
    """
    stages = stages_of(source)
    is_alone = not (dist.is_available() and dist.is_initialized())
    is_alone |= any(isinstance(resolve_group(stage.group), LocalGroup) for stage in stages)
    is_alone |= default_alone and not stages
    deadline = Deadline(TIMEOUT)
    control: Control = LocalControl() if is_alone else control_of(world(), deadline)
    control.begin(name, 0, deadline, lambda: name)
    try:
        yield control
    except BaseException as error:
        if not control.raises_everywhere:  # the others go on, and would wait
            kind, text = described(error)
            control.give_up(Failure(control.rank, None, None, "", kind, text, "broken"))
        raise
    finally:
        control.end()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
