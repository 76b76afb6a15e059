"""The unit and the axis of a picture's numbers.

A program knows no units; whoever draws says what a number of time or of memory means,
with the name of a `Unit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxpipe.errors import FxpipeError
from fxpipe.text import bytes_text, number_text, seconds_text

__all__ = ["PLAIN", "Unit", "nice_ticks"]

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Unit:
    """What one of a number means: "s", "ms", "us", "bytes", any other word, or nothing."""

    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise FxpipeError(f"a unit is a word such as 'ms' or 'bytes', got {self.name!r}")

    @property
    def seconds(self) -> float | None:
        """How many seconds one is, if it is a time."""
        return _SECONDS.get(self.name)

    def text(self, value: float) -> str:
        """The value with its unit, three or four digits."""
        if self.name == "bytes":
            return bytes_text(value)
        if self.seconds is not None:
            return seconds_text(value * self.seconds)
        return f"{number_text(value)} {self.name}".rstrip()


PLAIN = Unit()


def nice_ticks(end: float, most: int) -> list[float]:
    """At most about `most` round numbers from 0 to `end`."""
    if not end > 0 or not math.isfinite(end):
        return [0.0]
    rough = end / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10, 20) if power * m >= rough * 0.999)
    return [step * index for index in range(math.floor(end / step * 1.0001) + 1)]
