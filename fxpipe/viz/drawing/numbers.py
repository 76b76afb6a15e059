"""Numbers as people read them: 1.5 GiB, 70.6 B, 12.3 ms.

The program knows no units; whoever draws says what a number of time and of memory
means, with the name of a `Unit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxpipe.errors import FxpipeError

__all__ = ["PLAIN", "Unit", "count_text", "flops_text", "nice_ticks", "number_text"]

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES = {"bytes": 1.0}


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
        if self.name in _BYTES:
            return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
        if self.seconds is not None:
            return _time_text(value * self.seconds)
        return f"{number_text(value)} {self.name}".rstrip()


PLAIN = Unit()


def number_text(value: float) -> str:
    """Up to four digits, without zeros at the end."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count_text(value: float) -> str:
    """A count, such as of parameters: 950, 12.4 k, 70.6 B."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def flops_text(value: float) -> str:
    """Operations: 12.4 MFLOPs, 3.2 PFLOPs."""
    return _scaled(value, 1000, ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"))


def nice_ticks(end: float, most: int) -> list[float]:
    """At most about `most` round numbers from 0 to `end`."""
    if not end > 0 or not math.isfinite(end):
        return [0.0]
    rough = end / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10, 20) if power * m >= rough * 0.999)
    return [step * index for index in range(math.floor(end / step * 1.0001) + 1)]


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    size = abs(value)
    level = 0
    while size >= base * 0.9995 and level < len(names) - 1:
        size, value, level = size / base, value / base, level + 1
    digits = 0 if level == 0 and value == round(value) else 2 if size < 10 else 1
    text = f"{value:.{digits}f}"
    if size < 10 and text.endswith(".00"):
        text = text[:-1]
    return f"{text} {names[level]}".rstrip()


def _time_text(seconds: float) -> str:
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= size * 0.9995 or name == "µs":
            return f"{seconds / size:.4g} {name}"
    raise AssertionError(seconds)
