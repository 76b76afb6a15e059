"""Look at each action of a program by itself, and count what there is.

In:  a program and its numbering.
Out: a `Census` (how often each piece of work occurs, which messages each rank
     exchanges with each other rank, in order), and a fault for each action that
     makes no sense alone: malformed, out of range, on the wrong rank, or a
     transfer where no edge leads to another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.program.action import Action, Kind
from fxpipe.program.faults import Fault, FaultKind
from fxpipe.program.numbering import COMPUTE_KINDS, Numbering
from fxpipe.program.program import Program

__all__ = ["Census", "take_census"]


@dataclass(frozen=True, slots=True)
class Census:
    """What a program contains.

    `work[kind][stage * num_microbatches + microbatch]` counts compute actions, also
    those inside pairs. `messages[rank][other]` lists the numbers of the values that
    the rank exchanges with another, sends and receives alike, in its own order.
    """

    work: tuple[list[int], ...]
    messages: tuple[tuple[list[int], ...], ...]
    has_parameter_actions: bool

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
    has_parameter_actions = False
    faults: list[Fault] = []
    for rank, actions in enumerate(program.ranks):
        own_stages = frozenset(program.placement.stages_of(rank))
        exchanged = messages[rank]
        for position, action in enumerate(actions):
            kind, stage, microbatch, peer, parts = action
            # The loop sees every action of long programs, so it only asks whether all is
            # well; `_explain` finds out what is wrong with the few that are not.
            try:
                if kind > 7:
                    has_parameter_actions |= not parts
                    if not any(_explain(action, rank, program, numbering)):
                        for part in parts:
                            work[part.kind][part.stage * num_microbatches + part.microbatch] += 1  # type: ignore[operator]
                        continue
                elif stage in own_stages and 0 <= microbatch < num_microbatches and not parts:  # type: ignore[operator]
                    if kind > 3:
                        number = carried[kind][stage][peer] + microbatch  # type: ignore[index, operator]
                        exchanged[rank_of[peer]].append(number)  # type: ignore[index]
                        continue
                    if peer is None:
                        work[kind][stage * num_microbatches + microbatch] += 1  # type: ignore[operator]
                        continue
            except (TypeError, KeyError, IndexError):
                pass
            faults += [
                Fault(fault, rank, position, action, message)
                for fault, message in _explain(action, rank, program, numbering)
            ]
    return Census(work, messages, has_parameter_actions), faults


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
    if kind.is_compute or kind.is_transfer:
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
