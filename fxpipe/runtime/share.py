"""What one rank knows, on all ranks (the loss, the next tokens), and what all must have alike."""

from __future__ import annotations

from typing import Any

from fxpipe.errors import InputError
from fxpipe.runtime.session import Session
from fxpipe.runtime.wire.failure import described, raise_problems

__all__ = ["check_alike", "share"]


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
        said = control.gather((None if problem is None else described(problem), value))
        with control.alike(problem):
            raise_problems([found for found, _ in said], problem)
            if len({one for _, one in said}) > 1:
                shown = ", ".join(f"{one} on rank {rank}" for rank, (_, one) in enumerate(said))
                raise InputError(f"{call}() needs {what} to be the same on all ranks, got {shown}")


def share(session: Session, call: str, value: Any, default: Any = ...) -> Any:
    """The first rank's value that is not None, or the default.

    Raises:
        InputError: on all ranks: nobody knows it, and there is no default.
    """
    with session.call(call) as control:
        control.exchange([])  # every call begins with one: so different calls are noticed
        found = [one for one in control.gather(value) if one is not None]
    if found:
        return found[0]
    if default is not ...:
        return default
    raise InputError("the latest call computed no loss: it had no loss_fn or no target")
