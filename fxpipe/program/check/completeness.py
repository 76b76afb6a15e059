"""Check that a program holds all work, all transfers and all parameter handling.

A census counts what there is, and finds each action that makes no sense alone: malformed, out of
range, on the wrong rank, or a transfer where no edge leads to another rank. If there is none, the
checks find each piece that is missing, doubled, unmatched or misplaced.

Complete means: each stage has one forward for each microbatch, and either no stage
has a backward (evaluation) or each has one B, or one I and one W, for each
microbatch. A lowered program moves each value that changes rank exactly once.
If any stage is reduced, all are, once, after their last weight gradient. If any
stage is unsharded, each computes only while unsharded and ends resharded. A residual that is
offloaded is reloaded before its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import cast

from fxpipe.program.action import (
    COMPUTE_KINDS,
    Action,
    Kind,
    Value,
    ValueKind,
    recv_of,
    send_of,
)
from fxpipe.program.check.faults import Fault, FaultKind
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Program, Step

__all__ = [
    "Census",
    "check_offloads",
    "check_parameters",
    "check_size",
    "check_transfers",
    "check_work",
    "take_census",
]

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


def check_size(program: Program) -> Iterator[Fault]:
    """Ranks that are far too short for the number of microbatches.

    Without this, a microbatch number with a few digits too many, read from a file, would
    have the validator count up to it.
    """
    for rank, actions in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        num_needed = len(stages) * program.num_microbatches
        if num_needed > 4096 and num_needed > 2 * len(actions):
            message = f"missing: {num_needed} forwards do not fit into {len(actions)} actions"
            last = Action(Kind.FORWARD, stages[-1], program.num_microbatches - 1)
            yield Fault(FaultKind.MISSING_WORK, rank, None, last, message)


def check_work(program: Program, census: Census) -> Iterator[Fault]:
    """Missing and doubled compute actions."""
    forward, whole, input_half, weight_half = census.work
    once = [1] * len(forward)
    has_backward = census.has_backward
    if forward == once and (
        not has_backward
        or (input_half == weight_half and list(map(add, whole, input_half)) == once)
    ):
        return
    places = _places(program)
    for index in range(len(forward)):
        at = divmod(index, program.num_microbatches)
        yield from _judge_work(program, *at, places, has_backward=has_backward)


_Places = dict[Action, list[Step]]


def _places(program: Program) -> _Places:
    """Where each compute action and each transfer stands."""
    places: _Places = {}
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            for part in action.each:
                places.setdefault(part, []).append(Step(rank, position, part))
    return places


def _judge_work(
    program: Program, stage: int, microbatch: int, places: _Places, *, has_backward: bool
) -> Iterator[Fault]:
    forward, whole, input_half, weight_half = (
        Action(kind, stage, microbatch) for kind in COMPUTE_KINDS
    )
    missing: list[tuple[Action, str]] = []
    if forward not in places:
        missing.append((forward, "each stage needs a forward for each microbatch"))
    if has_backward:
        if not {whole, input_half, weight_half} & places.keys():
            missing.append((whole, "no backward, neither whole nor as I and W"))
        elif whole not in places and weight_half not in places:
            missing.append((weight_half, f"{input_half} leaves its weight gradient to it"))
        elif whole not in places and input_half not in places:
            missing.append((input_half, f"{weight_half} needs what it leaves"))
    rank = program.placement.stage_to_rank[stage]
    for action, message in missing:
        yield Fault(FaultKind.MISSING_WORK, rank, None, action, f"missing: {message}")
    for action in (forward, whole, input_half, weight_half):
        found = places.get(action, [])
        for step in found[1:]:
            yield _fault(FaultKind.DOUBLED_WORK, step, f"done before, {_where(found[:1])}")
        if action in (input_half, weight_half) and whole in places:
            message = f"{whole} does this work already, {_where(places[whole])}"
            for step in found:
                yield _fault(FaultKind.DOUBLED_WORK, step, message)


def _fault(kind: FaultKind, step: Step, message: str) -> Fault:
    return Fault(kind, step.rank, step.position, step.action, message)


def _where(steps: list[Step]) -> str:
    return " and ".join(f"on rank {step.rank} at position {step.position}" for step in steps)


def check_transfers(program: Program, numbering: Numbering, census: Census) -> Iterator[Fault]:
    """Values that change rank and are not moved exactly once."""
    if not numbering.lowered:
        return
    values = [
        value
        for _, value in numbering.crossing
        if census.has_backward or value.kind is ValueKind.ACTIVATION
    ]
    expected: Counter[tuple[int, int]] = Counter()
    for value in values:
        expected[min(numbering.ends(value)), max(numbering.ends(value))] += 1
    for low in range(program.num_ranks):
        for high in range(low + 1, program.num_ranks):
            at_low, at_high = census.messages[low][high], census.messages[high][low]
            count = expected[low, high] * program.num_microbatches
            if not (
                len(at_low) == len(at_high) == len(set(at_low)) == count
                and (at_low == at_high or set(at_low) == set(at_high))
                and (census.has_backward or all(map(numbering.is_activation, at_low)))
            ):
                yield from _judge_transfers(program, numbering, (low, high), values)


def _judge_transfers(
    program: Program, numbering: Numbering, ends: tuple[int, int], values: list[Value]
) -> Iterator[Fault]:
    """What is wrong between two ranks."""
    places = _places(program)
    for base in values:
        sender, receiver = numbering.ends(base)
        if {sender, receiver} != set(ends):
            continue
        for microbatch in range(program.num_microbatches):
            value = base._replace(microbatch=microbatch)
            send, recv = send_of(value), recv_of(value)
            sent, received = places.pop(send, []), places.pop(recv, [])
            if not sent and not received:
                message = f"missing: rank {receiver} reads {value}, which rank {sender} makes"
                yield Fault(FaultKind.MISSING_TRANSFER, sender, None, send, message)
            elif not received:
                message = f"rank {receiver} has no {recv} to match it"
                yield _fault(FaultKind.UNMATCHED_TRANSFER, sent[-1], message)
            elif not sent:
                message = f"rank {sender} has no {send} to match it"
                yield _fault(FaultKind.UNMATCHED_TRANSFER, received[-1], message)
            for found in (sent, received):
                if len(found) > 1:
                    message = f"occurs {len(found)} times, this is the last"
                    yield _fault(FaultKind.DOUBLED_TRANSFER, found[-1], message)
    rank_of = program.placement.stage_to_rank
    for action, steps in places.items():
        kind, stage, number, peer, _ = action
        if kind.is_send and peer is not None and {rank_of[stage], rank_of[peer]} == set(ends):
            value = numbering.value(numbering.carried[kind][stage][peer] + (number or 0))
            message = f"no forward-only program has {value}"
            yield _fault(FaultKind.UNMATCHED_TRANSFER, steps[-1], message)


def check_parameters(program: Program, census: Census) -> Iterator[Fault]:
    """UNSHARD, RESHARD and REDUCE_GRAD that are missing, doubled or misplaced."""
    reductions = [s for s in census.parameter_actions if s.action.kind is Kind.REDUCE_GRAD]
    for rank in range(program.num_ranks):
        if len(reductions) < len(census.parameter_actions):
            yield from _check_sharding(program, rank)
        if reductions:
            yield from _check_reductions(program, rank, [s for s in reductions if s.rank == rank])


def check_offloads(program: Program, census: Census) -> Iterator[Fault]:
    """Residuals that are offloaded or reloaded where they are not, or missed by their backward."""
    for rank in {step.rank for step in census.offloads}:
        where: dict[tuple[int, int | None], str] = {}
        for position, action in enumerate(program.ranks[rank]):
            for part in action.each:
                key, kind = (part.stage, part.microbatch), part.kind
                needed = _RESIDUAL_MUST_BE.get(kind)
                found = where.get(key, "not made yet")
                if needed is not None and found != needed:
                    message = f"its residual is {found} here, and must be {needed}"
                    yield Fault(FaultKind.OFFLOAD, rank, position, part, message)
                where[key] = _RESIDUAL_BECOMES.get(kind, found)


_RESIDUAL_BECOMES = {
    Kind.FORWARD: "on the device",
    Kind.OFFLOAD: "on the host",
    Kind.RELOAD: "on the device",
    Kind.BACKWARD: "used up",
    Kind.BACKWARD_INPUT: "used up",
}
_RESIDUAL_MUST_BE = {
    Kind.OFFLOAD: "on the device",
    Kind.RELOAD: "on the host",
    Kind.BACKWARD: "on the device",
    Kind.BACKWARD_INPUT: "on the device",
}


def _check_sharding(program: Program, rank: int) -> Iterator[Fault]:
    unsharded: dict[int, int] = {}
    for position, action in enumerate(program.ranks[rank]):
        kind, stage, _, _, parts = action
        message = ""
        if kind.is_compute or parts:
            if stage in unsharded and not parts:
                continue
            sharded = {part.stage for part in parts or (action,)} - unsharded.keys()
            if sharded:
                message = f"computes while stage {min(sharded)} is sharded: UNSHARD it before"
        elif kind is Kind.UNSHARD:
            if stage in unsharded:
                message = f"stage {stage} is unsharded already, since position {unsharded[stage]}"
            unsharded[stage] = position
        elif kind is Kind.RESHARD and unsharded.pop(stage, None) is None:
            message = f"stage {stage} is not unsharded here"
        if message:
            yield Fault(FaultKind.PARAMETERS, rank, position, action, message)
    for stage, position in unsharded.items():
        yield Fault(
            FaultKind.PARAMETERS,
            rank,
            position,
            Action(Kind.UNSHARD, stage),
            f"stage {stage} is never resharded after this",
        )


def _check_reductions(program: Program, rank: int, reductions: list[Step]) -> Iterator[Fault]:
    last_gradient = _last_gradients(program, rank)
    for stage in program.placement.stages_of(rank):
        action = Action(Kind.REDUCE_GRAD, stage)
        positions = [step.position for step in reductions if step.action.stage == stage]
        if not positions:
            message = "missing: other stages are reduced, this one is not"
            yield Fault(FaultKind.PARAMETERS, rank, None, action, message)
        for position in positions[1:]:
            message = f"stage {stage} is reduced before, at position {positions[0]}"
            yield Fault(FaultKind.PARAMETERS, rank, position, action, message)
        for position in positions[:1]:
            last = last_gradient.get(stage)
            if last is None:
                message = f"stage {stage} has no weight gradient to reduce"
                yield Fault(FaultKind.PARAMETERS, rank, position, action, message)
            elif position < last.position:
                message = f"{last.action} adds to the gradient later, at position {last.position}"
                yield Fault(FaultKind.PARAMETERS, rank, position, action, message)


def _last_gradients(program: Program, rank: int) -> dict[int, Step]:
    """Where each stage of a rank gets its last weight gradient, if it does."""
    actions = program.ranks[rank]
    num_stages = len(program.placement.stages_of(rank))
    last: dict[int, Step] = {}
    for position in range(len(actions) - 1, -1, -1):
        action = actions[position]
        for part in action.each:
            if part.kind is Kind.BACKWARD or part.kind is Kind.BACKWARD_WEIGHT:
                last.setdefault(part.stage, Step(rank, position, part))
        if len(last) == num_stages:
            break
    return last
