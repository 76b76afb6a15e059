"""Add the actions that make room in memory: UNSHARD, RESHARD, REDUCE_GRAD; OFFLOAD, RELOAD.

In:  the actions of one rank, with transfers.
Out: the same with parameter handling, or copies of residuals to and from the host, between them.

A stage is reduced once a step, after its last weight gradient. The stages that a rank
uses next are kept unsharded, as many as allowed, so that gathering the parameters of
one overlaps with computing another.

What waits long for its backward moves to host memory behind its forward, and back in time. The
copies run beside compute: out while the next actions run, back during the one before the backward.
"""

from __future__ import annotations

from collections.abc import Collection

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Kind

__all__ = ["add_offloads", "add_reductions", "add_sharding"]


def add_reductions(actions: list[Action], stages: Collection[int]) -> list[Action]:
    """Reduce a stage once its last weight gradient is there and its sends are on their way."""
    due: dict[int, list[Action]] = {}
    reduced: set[int] = set()
    behind_sends = len(actions)
    for position in range(len(actions) - 1, -1, -1):
        action = actions[position]
        if not action.kind.is_send:
            for part in action.each:
                adds = part.kind is Kind.BACKWARD or part.kind is Kind.BACKWARD_WEIGHT
                if adds and part.stage not in reduced:
                    reduced.add(part.stage)
                    due.setdefault(behind_sends, []).append(Action(Kind.REDUCE_GRAD, part.stage))
            if len(reduced) == len(stages):
                break
            behind_sends = position
    result: list[Action] = []
    done = 0
    for position in sorted(due):
        result += actions[done:position] + due[position]
        done = position
    return result + actions[done:]


def add_sharding(
    rank: int,
    actions: list[Action],
    num_stages: int,
    max_unsharded: int,
    lookahead: int | None = None,
) -> list[Action]:
    """Keep the next stages to be used unsharded, as many as allowed.

    Of those that are not, only the next `lookahead` are gathered; default: all. A change stands
    right behind the compute action that makes room for it and its sends, before any receive,
    so that gathering starts as early as it can.
    """
    sharded: list[Action] = []
    unsharded: tuple[int, ...] = ()
    done = 0
    ahead = max_unsharded if lookahead is None else min(lookahead, max_unsharded)
    changes = _upcoming_stages(rank, actions, num_stages, max_unsharded, ahead)
    for position, wanted in reversed(changes):
        sharded += actions[done:position]
        sharded += [Action(Kind.RESHARD, stage) for stage in unsharded if stage not in wanted]
        sharded += [Action(Kind.UNSHARD, s) for s in wanted[:ahead] if s not in unsharded]
        unsharded = tuple(s for i, s in enumerate(wanted) if i < ahead or s in unsharded)
        done = position
    return sharded + actions[done:] + [Action(Kind.RESHARD, stage) for stage in unsharded]


def _upcoming_stages(
    rank: int, actions: list[Action], num_stages: int, max_unsharded: int, ahead: int
) -> list[tuple[int, tuple[int, ...]]]:
    """From which position on which stages are the next to be used; last position first."""
    steps = {max_unsharded, ahead}
    changes: list[tuple[int, tuple[int, ...]]] = []
    queue: tuple[int, ...] = ()
    head = -1
    behind_sends = position = len(actions)
    for action in reversed(actions):
        position -= 1
        kind, stage, _, _, parts = action
        if not kind.is_compute and not parts:
            if not kind.is_send and kind is not Kind.REDUCE_GRAD:
                behind_sends = position
            continue
        if stage != head or parts:
            used = list(dict.fromkeys(part.stage for part in parts)) if parts else [stage]
            if len(used) > ahead:
                raise ScheduleError(
                    f"rank {rank}, {action}: needs {len(used)} stages unsharded at once, "
                    f"but max_unsharded is {max_unsharded}"
                    + (f" and the lookahead {ahead}" if ahead < max_unsharded else "")
                )
            longer = (*used, *[other for other in queue if other not in used])
            wanted = queue[:max_unsharded]
            if wanted and any(not set(queue[:n]).issuperset(longer[:n]) for n in steps):
                changes.append((behind_sends, wanted))
            queue, head = longer, stage
            if len(queue) == num_stages <= ahead:
                break  # all stages of the rank from the start to here
        behind_sends = position
    return [*changes, (0, _first_used(actions, queue[:max_unsharded]))]


def _first_used(actions: list[Action], stages: tuple[int, ...]) -> tuple[int, ...]:
    """The stages in the order in which they are first used."""
    found: dict[int, None] = {}
    for action in actions:
        if action.kind.is_compute or action.parts:
            found.update((p.stage, None) for p in action.each if p.stage in stages)
            if len(found) == len(stages):
                break
    return tuple(found)


_Key = tuple[int, int | None]


def add_offloads(actions: list[Action], distance: int) -> list[Action]:
    """Offload residuals that wait for more than `distance` (at least 2) compute actions.

    With distance 2:

        0F0 0F1 0F2 0B0  ->  0F0 0OFFLOAD0 0F1 0RELOAD0 0F2 0B0
    """
    begins: dict[_Key, int] = {}
    due: dict[int, list[_Key]] = {}
    number = 0
    for action in actions:
        if action.kind.is_compute or action.parts:
            for part in action.each:
                key = (part.stage, part.microbatch)
                if part.kind is Kind.FORWARD:
                    begins[key] = number
                elif part.kind is not Kind.BACKWARD_WEIGHT and number - begins[key] > distance:
                    due.setdefault(number - 1, []).append(key)
            number += 1
    away = {key for keys in due.values() for key in keys}
    result: list[Action] = []
    behind_sends: list[Action] = []
    number = 0
    for action in actions:
        if not action.kind.is_send:
            result += behind_sends
            behind_sends = []
        if action.kind.is_compute or action.parts:
            result += (Action(Kind.RELOAD, *key) for key in due.get(number, ()))
            number += 1
            behind_sends = [
                Action(Kind.OFFLOAD, part.stage, part.microbatch)
                for part in action.each
                if part.kind is Kind.FORWARD and (part.stage, part.microbatch) in away
            ]
        result.append(action)
    return result + behind_sends
