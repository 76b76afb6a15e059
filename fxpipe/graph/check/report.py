"""What a check may cost, and what it found."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.errors import InputError

__all__ = ["Budget", "CheckReport", "not_checked", "read_budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What the check of a pipe may use: seconds, and bytes beside the model's own."""

    seconds: float = 2.0
    memory: float = 1e9

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory <= 0:
            raise InputError(f"a budget must be positive, got {self}")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The runs in which the plain model and the pipe were equal, and what is not known.

    `refused` are runs that the pipe refuses with an error of its own, although the plain
    model runs; `left_out` is what was not compared, and why; `noted` is what differs
    although all values are equal: random numbers of Python or numpy.
    """

    equal: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_checked(self) -> bool:
        return bool(self.equal)

    def lines(self) -> list[str]:
        """The report for people, without times."""
        found = [f"equal to the plain model: {'; '.join(self.equal)}"] if self.equal else []
        found += [f"refused: {text}" for text in self.refused]
        found += [f"different, with equal values: {text}" for text in self.noted]
        return found + [f"not checked: {text}" for text in self.left_out]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def not_checked(reason: str) -> CheckReport:
    """The report of a pipe that never ran beside its model."""
    return CheckReport(left_out=(reason,))


def read_budget(check: object) -> Budget | None:
    """Turn the `check` of `pipeline` into a budget; None means no check.

    Raises:
        InputError: `check` is something else.
    """
    if check is False:
        return None
    if isinstance(check, Budget):
        return check
    if check is True:
        return Budget(float("inf"), float("inf"))
    if check == "auto":
        return Budget()
    raise InputError(f'check must be "auto", True, False or a Budget, got {check!r}')
