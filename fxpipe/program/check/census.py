"""Look at each action of a program by itself, and count what there is.

In:  a program and its numbering.
Out: a `Census` (how often each piece of work occurs, which messages each rank
     exchanges with each other rank, in order), and a fault for each action that
     makes no sense alone: malformed, out of range, on the wrong rank, or a
     transfer where no edge leads to another rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from fxpipe.program.action import COMPUTE_KINDS, Action, Kind
from fxpipe.program.check.faults import Fault, FaultKind
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Program, Step

__all__ = ["Census", "take_census"]


# An action as the counting loop hopes to find it.
_Row = tuple[Kind, int, int, int, tuple[Action, ...]]


@dataclass(frozen=True, slots=True)
class Census:
    """What a program contains.

    `work[kind][stage * num_microbatches + microbatch]` counts compute actions, also
    those inside pairs. `messages[rank][other]` lists the numbers of the values that
    the rank exchanges with another, sends and receives alike, in its own order.
    `parameter_actions` are all UNSHARD, RESHARD and REDUCE_GRAD, `offloads` all OFFLOAD and RELOAD.
    """

    work: tuple[list[int], ...]
    messages: tuple[tuple[list[int], ...], ...]
    parameter_actions: tuple[Step, ...]
    offloads: tuple[Step, ...]

    @property
    def has_backward(self) -> bool:
        return any(any(self.work[kind]) for kind in COMPUTE_KINDS if kind is not Kind.FORWARD)


def take_census(program: Program, numbering: Numbering) -> tuple[Census, list[Fault]]:
    """Count all actions; the census is to be used only if there are no faults."""
    num_microbatches = program.num_microbatches
    rank_of = program.placement.stage_to_rank
    carried = numbering.carried
    work = tuple([0] * (program.num_stages * num_microbatches) for _ in COMPUTE_KINDS)
    messages: tuple[tuple[list[int], ...], ...] = tuple(
        tuple([] for _ in range(program.num_ranks)) for _ in range(program.num_ranks)
    )
    parameter_actions: list[Step] = []
    offloads: list[Step] = []
    faults: list[Fault] = []
    for rank, actions in enumerate(program.ranks):
        own_stages = frozenset(program.placement.stages_of(rank))
        exchanged = messages[rank]
        for position, action in enumerate(cast(Sequence[_Row], actions)):
            kind, stage, microbatch, peer, parts = action
            # The loop sees every action of long programs, so it only asks whether all is
            # well; `_explain` finds out what is wrong with the few that are not.
            try:
                if stage in own_stages and not parts and 0 <= microbatch < num_microbatches:
                    if peer is None:
                        work[kind][stage * num_microbatches + microbatch] += 1
                    else:
                        number = carried[kind][stage][peer] + microbatch
                        exchanged[rank_of[peer]].append(number)
                    continue
            except (TypeError, KeyError, IndexError):
                pass
            explained = list(_explain(cast(Action, action), rank, program, numbering))
            faults += [
                Fault(fault, rank, position, cast(Action, action), message)
                for fault, message in explained
            ]
            if not explained and not parts:
                others = offloads if kind.is_offload else parameter_actions
                others.append(Step(rank, position, cast(Action, action)))
            elif not explained:
                for part in cast(Sequence[_Row], parts):
                    work[part[0]][part[1] * num_microbatches + part[2]] += 1
    return Census(work, messages, tuple(parameter_actions), tuple(offloads)), faults


def _explain(
    action: Action, rank: int, program: Program, numbering: Numbering
) -> Iterator[tuple[FaultKind, str]]:
    kind, stage, microbatch, peer, parts = action
    if kind is Kind.OVERLAP:
        yield from _explain_pair(action, rank, program, numbering)
        return
    if parts:
        yield FaultKind.MALFORMED, "only an OVERLAP has parts"
    if not 0 <= stage < program.num_stages:
        yield FaultKind.OUT_OF_RANGE, f"stages go from 0 to {program.num_stages - 1}"
        return
    owner = program.placement.stage_to_rank[stage]
    if owner != rank:
        yield FaultKind.WRONG_RANK, f"stage {stage} is on rank {owner}"
    if kind.is_compute or kind.is_transfer or kind.is_offload:
        if not isinstance(microbatch, int):
            yield FaultKind.MALFORMED, "needs a microbatch"
        elif not 0 <= microbatch < program.num_microbatches:
            last = program.num_microbatches - 1
            yield FaultKind.OUT_OF_RANGE, f"microbatches go from 0 to {last}"
    elif microbatch is not None:
        yield FaultKind.MALFORMED, f"{kind.text} is for a whole stage and takes no microbatch"
    if not kind.is_transfer:
        if peer is not None:
            yield FaultKind.MALFORMED, f"only transfers have a peer, found peer {peer}"
        return
    if peer is None:
        yield FaultKind.MALFORMED, "a transfer needs the stage at its other end as peer"
    elif not 0 <= peer < program.num_stages:
        yield (
            FaultKind.OUT_OF_RANGE,
            f"the peer is stage {peer}, but stages go from 0 to {program.num_stages - 1}",
        )
    elif program.placement.stage_to_rank[peer] == owner:
        yield (
            FaultKind.NO_EDGE,
            f"stages {stage} and {peer} are both on rank {owner}: nothing to transfer",
        )
    elif peer not in numbering.carried[kind][stage]:
        source, target = (stage, peer) if kind.is_send else (peer, stage)
        what = "gradient" if "B" in kind.text else "activation"
        yield FaultKind.NO_EDGE, f"no {what} goes from stage {source} to stage {target}"


def _explain_pair(
    pair: Action, rank: int, program: Program, numbering: Numbering
) -> Iterator[tuple[FaultKind, str]]:
    if len(pair.parts) != 2 or not all(part.kind.is_compute for part in pair.parts):
        yield FaultKind.MALFORMED, "an OVERLAP is a pair of compute actions"
        return
    if pair.peer is not None:
        yield FaultKind.MALFORMED, f"only transfers have a peer, found peer {pair.peer}"
    for part in pair.parts:
        for fault, message in _explain(part, rank, program, numbering):
            yield fault, f"{part}: {message}"
