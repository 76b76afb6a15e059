"""Say a program in torch's words: `_Action`, `_ComputationType`, orders by rank.

In:  actions of ours, or what users of torch's pipelining write: `{rank: [action, None, ...]}`.
Out: the same in the other's words.

torch's actions name no second stage of a transfer, and a program written in its words has
compute alone that counts: transfers, waits and what is for whole stages are left out and added
anew by the lowering, for the edges that the stages have.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Kind
from fxpipe.program.formats.text import WAIT, parse_action, write_csv
from fxpipe.program.program import Program

__all__ = ["_Action", "_ComputationType", "computes_of", "order_of", "program_of_order"]


class _ComputationType(enum.StrEnum):
    """torch's names for the kinds of actions; the waits are those of its version 2.15."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        try:
            return _ComputationType(action)
        except ValueError:
            known = ", ".join(kind.value for kind in _ComputationType)
            raise ScheduleError(f"there is no action kind {action!r}; known: {known}") from None

    @property
    def kind(self) -> Kind:
        """Our kind.

        Raises:
            ScheduleError: it is a wait, which is no action here.
        """
        for kind in Kind:
            if kind.text == self.value:
                return kind
        raise ScheduleError(f"{self.value} is no action here: whatever is sent is waited for")


class _Action(NamedTuple):
    """An action as torch makes, reads and prints it."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    @staticmethod
    def of(action: Action) -> _Action:
        parts = tuple(_Action.of(part) for part in action.parts)
        if parts:
            return _Action(-1, _ComputationType.OVERLAP_F_B, None, parts)
        return _Action(action.stage, _ComputationType(action.kind.text), action.microbatch)

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """The action that prints as the text; None for blanks.

        Raises:
            ScheduleError: a RuntimeError, as torch's; the text is none of an action.
        """
        text = action_string.strip()
        if not text:
            return None
        wait = WAIT.fullmatch(text)
        if wait is not None:
            number = int(wait["microbatch"]) if wait["microbatch"] else None
            return _Action(int(wait["stage"]), _ComputationType(wait["kind"]), number)
        return _Action.of(parse_action(text))

    @property
    def is_compute_op(self) -> bool:
        return self.sub_actions is not None or len(self.computation_type.value) == 1

    def ours(self) -> Action:
        """The action in our words."""
        return parse_action(str(self))

    def __str__(self) -> str:
        if self.sub_actions:
            return f"({';'.join(map(str, self.sub_actions))}){self.computation_type.value}"
        number = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{number}"

    def __repr__(self) -> str:
        return str(self)


def order_of(rows: Iterable[Sequence[Action | None]]) -> dict[int, list[_Action | None]]:
    """torch's order of a program: for each rank its actions, None where it waits."""
    return {
        rank: [None if action is None else _Action.of(action) for action in row]
        for rank, row in enumerate(rows)
    }


def computes_of(actions: Iterable[Any]) -> Iterator[Action]:
    """The compute actions of a rank that is given as objects of either kind, or text; None is idle.

    Raises:
        ScheduleError: a text that is none of an action.
    """
    for given in actions:
        action = None if given is None else _Action.from_str(str(given))
        if action is not None and action.is_compute_op:
            yield action.ours()


def program_of_order(order: Mapping[int, Sequence[Any]], *, name: str) -> Program:
    """The compute-only program that an order in torch's words stands for.

    Raises:
        ScheduleError: ranks are missing, an action cannot be read, stages are on two ranks.
    """
    missing = [rank for rank in range(max(order, default=0) + 1) if rank not in order]
    if missing or not order:
        raise ScheduleError(f"an order needs actions of every rank, but has none for {missing}")
    rows = [[str(action) for action in computes_of(order[rank])] for rank in sorted(order)]
    return Program.from_csv(write_csv(rows), name=name)
