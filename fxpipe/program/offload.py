"""Move what waits long for its backward to host memory: OFFLOAD and RELOAD.

In:  the actions of one rank, with transfers.
Out: the same with an OFFLOAD behind each forward whose backward is far away, and a RELOAD in time.

The copies run beside compute: out while the next actions run, back during the one before the
backward.
"""

from __future__ import annotations

from fxpipe.program.action import Action, Kind

__all__ = ["add_offloads"]

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
            for part in action.parts or (action,):
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
                for part in action.parts or (action,)
                if part.kind is Kind.FORWARD and (part.stage, part.microbatch) in away
            ]
        result.append(action)
    return result + behind_sends
