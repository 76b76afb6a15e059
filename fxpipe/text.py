"""Numbers and tables as people read them; the same number is written alike everywhere.

    >>> bytes_text(33_280), seconds_text(0.0421), count_text(70_553_706_496)
    ('33.3 kB', '42.1 ms', '70.6 B')

Bytes are decimal (1 kB = 1000 B), as in the data sheets of devices and links.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from html import escape

__all__ = [
    "aligned",
    "bytes_text",
    "count_text",
    "flops_text",
    "html_table",
    "number_text",
    "seconds_text",
]


def bytes_text(count: float) -> str:
    """Bytes: 512 B, 33.3 kB, 80 GB."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def seconds_text(seconds: float) -> str:
    """A time: 1.5 s, 42.1 ms, 3.2 us."""
    if seconds == 0 or abs(seconds) >= 0.9995:
        return f"{_digits(seconds)} s"
    return _scaled(seconds * 1e9, ("ns", "us", "ms", "s"))


def count_text(count: float) -> str:
    """A count, such as of parameters: 950, 12.4 k, 70.6 B."""
    return _scaled(count, ("", "k", "M", "B", "T")).rstrip()


def flops_text(flops: float) -> str:
    """Operations: 12.4 MFLOPs, 3.2 PFLOPs."""
    return _scaled(flops, ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"))


def number_text(value: float) -> str:
    """A number without a unit: up to four digits, no zeros at the end."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def aligned(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), rule: bool = False
) -> list[str]:
    """The rows as lines with aligned columns; the columns in `left` to the left, others right.

    The first row is the heading; `rule` draws a line below it.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if rule:
        rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]], *, names: Collection[str] = ()) -> str:
    """The rows as an HTML table; the first row is the heading.

    Columns headed as in `names` have the class "name".
    """
    looks = [' class="name"' if head in names else "" for head in rows[0]]
    head, *body = (
        "".join(
            f"<{tag}{look}>{escape(cell)}</{tag}>" for look, cell in zip(looks, row, strict=True)
        )
        for tag, row in zip(("th", *("td",) * len(rows)), rows, strict=False)
    )
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _scaled(value: float, names: Sequence[str]) -> str:
    level = 0
    while abs(value) >= 999.5 and level < len(names) - 1:
        value, level = value / 1000, level + 1
    return f"{_digits(value)} {names[level]}"


def _digits(value: float) -> str:
    """Three digits, or all of a whole part that has more."""
    return f"{value:.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:.3g}"
