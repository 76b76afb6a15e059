"""Check that a program holds all work, all transfers and all parameter handling.

In:  a program whose actions make sense one by one, and its census.
Out: a fault for each piece that is missing, doubled, unmatched or misplaced.

Complete means: each stage has one forward for each microbatch, and either no stage
has a backward (evaluation) or each has one B, or one I and one W, for each
microbatch. A lowered program moves each value that changes rank exactly once.
If any stage is reduced, all are, once, after their last weight gradient. If any
stage is unsharded, each computes only while unsharded and ends resharded. A residual that is
offloaded is reloaded before its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import add

from fxpipe.program.action import Action, Kind, Value, ValueKind, recv_of, send_of
from fxpipe.program.check.census import Census
from fxpipe.program.check.faults import Fault, FaultKind
from fxpipe.program.play.numbering import Numbering
from fxpipe.program.program import Program, Step

__all__ = ["check_offloads", "check_parameters", "check_size", "check_transfers", "check_work"]


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
        stage, microbatch = divmod(index, program.num_microbatches)
        yield from _judge_forward(program, stage, microbatch, forward[index], places)
        if has_backward:
            found = (whole[index], input_half[index], weight_half[index])
            yield from _judge_backward(program, stage, microbatch, found, places)


_Places = dict[Action, list[tuple[int, int]]]


def _places(program: Program) -> _Places:
    places: _Places = {}
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            for part in action.parts or (action,):
                places.setdefault(part, []).append((rank, position))
    return places


def _judge_forward(
    program: Program, stage: int, microbatch: int, found: int, places: _Places
) -> Iterator[Fault]:
    action = Action(Kind.FORWARD, stage, microbatch)
    if found == 0:
        yield _missing(program, action, "each stage needs a forward for each microbatch")
    elif found > 1:
        yield from _doubled(action, places)


def _judge_backward(
    program: Program, stage: int, microbatch: int, found: tuple[int, int, int], places: _Places
) -> Iterator[Fault]:
    whole, input_half, weight_half = (
        Action(kind, stage, microbatch)
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if found in ((1, 0, 0), (0, 1, 1)):
        return
    if found == (0, 0, 0):
        yield _missing(program, whole, "no backward, neither whole nor as I and W")
    for action, count in zip((whole, input_half, weight_half), found, strict=True):
        if count > 1:
            yield from _doubled(action, places)
    if found[0]:
        for action in (input_half, weight_half):
            for rank, position in places.get(action, ()):
                yield Fault(
                    FaultKind.DOUBLED_WORK,
                    rank,
                    position,
                    action,
                    f"{whole} does this work already, {_where(places[whole])}",
                )
    elif found[1] and not found[2]:
        yield _missing(program, weight_half, f"{input_half} leaves its weight gradient to it")
    elif found[2] and not found[1]:
        yield _missing(program, input_half, f"{weight_half} needs what it leaves")


def _missing(program: Program, action: Action, message: str) -> Fault:
    rank = program.placement.stage_to_rank[action.stage]
    return Fault(FaultKind.MISSING_WORK, rank, None, action, f"missing: {message}")


def _doubled(action: Action, places: _Places) -> Iterator[Fault]:
    first, *more = places[action]
    for rank, position in more:
        yield Fault(
            FaultKind.DOUBLED_WORK,
            rank,
            position,
            action,
            f"done before, {_where([first])}",
        )


def _where(places: list[tuple[int, int]]) -> str:
    return " and ".join(f"on rank {rank} at position {position}" for rank, position in places)


def check_transfers(program: Program, numbering: Numbering, census: Census) -> Iterator[Fault]:
    """Values that change rank and are not moved exactly once."""
    if not numbering.lowered:
        return
    has_backward = census.has_backward
    rank_of = program.placement.stage_to_rank
    expected: dict[tuple[int, int], list[Value]] = {}
    for _, value in numbering.crossing:
        if has_backward or value.kind is ValueKind.ACTIVATION:
            ends = (rank_of[value.stage], rank_of[value.peer])
            expected.setdefault((min(ends), max(ends)), []).append(value)
    for low in range(program.num_ranks):
        for high in range(low + 1, program.num_ranks):
            values = expected.get((low, high), [])
            at_low, at_high = census.messages[low][high], census.messages[high][low]
            num_expected = len(values) * program.num_microbatches
            if len(at_low) == len(at_high) == num_expected and (
                len(set(at_low)) == num_expected
                and (at_low == at_high or set(at_low) == set(at_high))
                and (has_backward or all(map(numbering.is_activation, at_low)))
            ):
                continue
            yield from _judge_transfers(program, numbering, (low, high), census, values)


def _judge_transfers(
    program: Program,
    numbering: Numbering,
    ends: tuple[int, int],
    census: Census,
    values: list[Value],
) -> Iterator[Fault]:
    low, high = ends
    rank_of = program.placement.stage_to_rank
    counts = {low: Counter(census.messages[low][high]), high: Counter(census.messages[high][low])}
    expected = {
        value._replace(microbatch=microbatch)
        for value in values
        for microbatch in range(program.num_microbatches)
    }
    found = {numbering.value(number): number for count in counts.values() for number in count}
    for value in sorted(expected | found.keys()):
        sender, receiver = rank_of[value.stage], rank_of[value.peer]
        number = found.get(value, -1)
        sent, received = counts[sender][number], counts[receiver][number]
        send, recv = send_of(value), recv_of(value)
        if value not in expected:
            message = f"no forward-only program has {value}"
            yield Fault(FaultKind.UNMATCHED_TRANSFER, sender, None, send, message)
            continue
        if sent == received == 0:
            message = f"missing: rank {receiver} reads {value}, which rank {sender} makes"
            yield Fault(FaultKind.MISSING_TRANSFER, sender, None, send, message)
        elif not received:
            yield _transfer_fault(
                FaultKind.UNMATCHED_TRANSFER,
                program,
                sender,
                send,
                f"rank {receiver} has no {recv} to match it",
            )
        elif not sent:
            yield _transfer_fault(
                FaultKind.UNMATCHED_TRANSFER,
                program,
                receiver,
                recv,
                f"rank {sender} has no {send} to match it",
            )
        for rank, action, count in ((sender, send, sent), (receiver, recv, received)):
            if count > 1:
                yield _transfer_fault(
                    FaultKind.DOUBLED_TRANSFER,
                    program,
                    rank,
                    action,
                    f"occurs {count} times, this is the last",
                )


def _transfer_fault(
    kind: FaultKind, program: Program, rank: int, action: Action, message: str
) -> Fault:
    actions = program.ranks[rank]
    last = max(position for position, other in enumerate(actions) if other == action)
    return Fault(kind, rank, last, action, message)


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
            for part in action.parts or (action,):
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
        for part in action.parts or (action,):
            if part.kind is Kind.BACKWARD or part.kind is Kind.BACKWARD_WEIGHT:
                last.setdefault(part.stage, Step(rank, position, part))
        if len(last) == num_stages:
            break
    return last
