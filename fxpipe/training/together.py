"""Calls that all processes make together, replicas included, or one process by itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from fxpipe.runtime.agree.arguments import timeout_seconds
from fxpipe.runtime.control.control import Control
from fxpipe.runtime.control.group_control import control_of
from fxpipe.runtime.wire.failure import Deadline
from fxpipe.runtime.wire.local_group import LocalGroup, resolve_group
from fxpipe.training.state import Source, stages_of

__all__ = ["gloo_world", "together"]

_GLOO: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def together(name: str, source: Source, *, default_alone: bool) -> Iterator[Control]:
    """One of `control.CALLS`, made by all processes; alone where all stages are in this one.

    The block begins with an exchange, which notices ranks that make different calls. A process
    without stages takes part. `default_alone` says what a plain model is: this process's own
    affair, or everybody's.
    """
    stages = stages_of(source)
    is_alone = not (dist.is_available() and dist.is_initialized())
    is_alone |= any(isinstance(resolve_group(stage.group), LocalGroup) for stage in stages)
    is_alone |= default_alone and isinstance(source, nn.Module)
    deadline = Deadline(timeout_seconds(None))
    control: Control = Control() if is_alone else control_of(_world(), deadline)
    with control.call(name, 0, deadline, lambda: name):
        yield control


def gloo_world() -> dist.ProcessGroup:
    """A gloo group of all processes that torch knows, made once; all of them call this."""
    world = _world()
    if world not in _GLOO:
        _GLOO[world] = dist.new_group(backend="gloo")
    return _GLOO[world]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
