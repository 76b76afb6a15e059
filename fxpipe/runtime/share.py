"""What one rank knows, on all ranks (the loss, the next tokens), and what all must have alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxpipe.errors import InputError
from fxpipe.runtime.control.control import agree_on
from fxpipe.runtime.session import Session

__all__ = ["check_alike", "first_known", "gather"]


def check_alike(
    session: Session, call: str, what: str, value: Any, problem: BaseException | None
) -> None:
    """Compare a value of all ranks; `problem` is why this rank has none.

    Raises:
        InputError: on all ranks: they have different values.
        the problem where there is one, RemoteStageError on the other ranks.
    """
    with session.call(call) as control:
        control.exchange([])
        agree_on(control, what, value, problem)


def gather(session: Session, call: str, value: Any) -> list[Any]:
    """What each rank says, on every rank."""
    with session.call(call) as control:
        control.exchange([])  # every call begins with one: so different calls are noticed
        return control.gather(value)


def first_known(said: Sequence[Any]) -> Any:
    """The first rank's value that is not None.

    Raises:
        InputError: nobody knows it.
    """
    for value in said:
        if value is not None:
            return value
    raise InputError("the latest call computed no loss: it had no loss_fn or no target")
