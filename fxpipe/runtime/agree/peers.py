"""Meet the other ranks once, before the first step.

Checks that all ranks mean the same pipeline, connects the pairs of ranks that will
talk in one order that all share, and makes tied parameters equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fxpipe.errors import FxpipeError, ScheduleError
from fxpipe.program import Program
from fxpipe.runtime.agree.interfaces import raise_together
from fxpipe.runtime.parameters import tied as ties
from fxpipe.runtime.stage.stage_kind import Stage, TracedFront
from fxpipe.runtime.wire.control import Control, GroupControl, LocalControl
from fxpipe.runtime.wire.local_group import LocalGroup
from fxpipe.runtime.wire.sockets import HostTransport, connect
from fxpipe.runtime.wire.transport import (
    LocalChannels,
    LocalTransport,
    ProcessGroupTransport,
    Transport,
)

__all__ = ["Peers", "meet"]

_FEW = 8  # ranks that agree by telling each other; more agree over their group


@dataclass(frozen=True, slots=True)
class Peers:
    """The way to the other ranks. `transports` has one entry per rank of this process."""

    control: Control
    transports: Mapping[int, Transport]
    channels: LocalChannels | None
    tied: Sequence[ties.TiedGroup]
    has_loss: bool

    @property
    def is_local(self) -> bool:
        return self.channels is not None


def meet(
    group: dist.ProcessGroup | LocalGroup,
    stages: Mapping[int, Stage],
    program: Program,
    facts: Mapping[str, Any],
    tied: Sequence[ties.TiedLocations],
    *,
    has_loss: bool,
    timeout: float,
) -> Peers:
    """Connect to the other ranks.

    Raises:
        ScheduleError: on all ranks, if they do not mean the same pipeline; lists what differs.
    """
    control: Control
    transports: dict[int, Transport]
    channels: LocalChannels | None = None
    if isinstance(group, LocalGroup):
        control = LocalControl()
        channels = LocalChannels()
        transports = {r: LocalTransport(r, channels) for r in range(program.num_ranks)}
    else:
        control = over = GroupControl(group, timeout)
        transports = {over.rank: _transport(group, over, stages, timeout)}
        _exchange_directly(over, transports[over.rank])
    problem: Exception | None = None
    try:
        _check_own_stages(stages, program, transports)
    except FxpipeError as error:
        problem = error
    raise_together(control, problem)
    _compare(control, stages, program, facts)
    stage = next(iter(stages.values()))
    if isinstance(stage.front, TracedFront):
        pairs = [(edge.source, edge.target) for edge in stage.front.info.edges]
        tied = (*stage.front.info.tied, *tied)
    else:
        pairs = [(s, s + 1) for s in range(program.num_stages - 1)]
    _warm_up(transports, program.placement.stage_to_rank, pairs, stage)
    modules = {index: stage.submod for index, stage in stages.items()}
    groups = ties.find_tied(tied, modules, program.placement.stage_to_rank)
    for rank, transport in transports.items():
        ties.broadcast(groups, rank, transport)
    for transport in transports.values():
        transport.finish()
    has_loss = any(control.gather(has_loss))
    return Peers(control, transports, channels, groups, has_loss)


def _transport(
    group: dist.ProcessGroup, control: GroupControl, stages: Mapping[int, Stage], timeout: float
) -> Transport:
    on_cpu = all(stage.device.type == "cpu" for stage in stages.values())
    made = connect(control, is_wanted=on_cpu)
    by_group = ProcessGroupTransport(group, timeout)
    if not made:
        return by_group
    known = weakref.ref(control)

    def gave_up() -> bool:
        alive = known()
        if alive is None:
            return True
        with contextlib.suppress(RuntimeError):
            alive.look()
        return alive.fault is not None and alive.fault.kind != "error"

    return HostTransport(by_group, made, timeout, gave_up)


def _exchange_directly(control: GroupControl, transport: Transport) -> None:
    """Let few ranks of one host agree over their sockets, which is quicker."""
    joins_all = isinstance(transport, HostTransport) and len(transport.peers) == control.size - 1
    if all(control.gather(joins_all and control.size <= _FEW)):
        control.use(transport)


def _check_own_stages(
    stages: Mapping[int, Stage], program: Program, ranks: Mapping[int, Transport]
) -> None:
    if len({type(stage.front) for stage in stages.values()}) > 1:
        raise ScheduleError("the stages of one pipeline must all be traced or all hand-written")
    placement = program.placement
    for rank in ranks:
        mine = [s for s in sorted(stages) if len(ranks) == 1 or placement.stage_to_rank[s] == rank]
        wanted = list(placement.stages_of(rank))
        if mine != wanted:
            raise ScheduleError(
                f"rank {rank} must hold the stages {wanted} for {program.name}, "
                f"but was given {mine}"
            )


def _compare(
    control: Control,
    stages: Mapping[int, Stage],
    program: Program,
    extra: Mapping[str, Any],
) -> None:
    stage = next(iter(stages.values()))
    facts: dict[str, Any] = {
        "schedule": program.name,
        "number of microbatches": program.num_microbatches,
        "number of stages": program.num_stages,
        "number of ranks": program.num_ranks,
        "kind of stages": type(stage.front).__name__,
        **extra,
    }
    facts["program"] = hashlib.sha256(str(program).encode()).hexdigest()[:12]
    if isinstance(stage.front, TracedFront):
        facts["plan of the traced model"] = stage.front.info.hash[:12]
    everywhere = control.gather(facts)
    lines = []
    for name in facts:
        values = [str(found.get(name)) for found in everywhere]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            lines.append(f"  {name}: {shown}")
    if lines:
        raise ScheduleError("the ranks do not run the same pipeline:\n" + "\n".join(lines))


def _warm_up(
    transports: Mapping[int, Transport],
    stage_to_rank: Sequence[int],
    edges: Sequence[tuple[int, int]],
    stage: Stage,
) -> None:
    pairs = {tuple(sorted((stage_to_rank[a], stage_to_rank[b]))) for a, b in edges}
    for rank, transport in transports.items():
        if isinstance(transport, ProcessGroupTransport | HostTransport):
            ours = [pair for pair in sorted(pairs) if pair[0] != pair[1] and rank in pair]
            peers = [b if a == rank else a for a, b in ours]
            transport.warm_up(peers, rank, stage.device)
