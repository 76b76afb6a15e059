"""Let fxpipe say what it is doing: the environment variable FXPIPE_LOG.

    FXPIPE_LOG=info python train.py
    FXPIPE_LOG=warning,runtime=debug torchrun --nproc-per-node 2 train.py

In:  a level for everything, levels for parts of the package, or both.
Out: lines on standard error such as `12:03:11.204 rank 1 info runtime.session: ...`.

Modules log through `logging.getLogger(__name__)` and know nothing of this. Without
FXPIPE_LOG nothing is printed, and a program that configures `logging` itself gets the
records as from any other package.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import TextIO

from fxpipe.errors import InputError

__all__ = ["LEVELS", "VARIABLE", "configure", "configure_from_environment", "parse_levels"]

VARIABLE = "FXPIPE_LOG"
LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_ROOT = "fxpipe"


def parse_levels(text: str) -> dict[str, int]:
    """The level of each logger that `text` names; "info,runtime=debug" names two.

    Raises:
        InputError: lists every part that is not a level, with the closest one that is.
    """
    levels: dict[str, int] = {}
    faults = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        name, _, level = part.rpartition("=")
        known = LEVELS.get(level.strip().lower())
        if known is None:
            close = difflib.get_close_matches(level.lower(), LEVELS, n=1)
            faults.append(f"{part!r}" + (f" (did you mean {close[0]}?)" if close else ""))
            continue
        name = name.strip().removeprefix(f"{_ROOT}.").removeprefix(_ROOT)
        levels[f"{_ROOT}.{name}" if name else _ROOT] = known
    if faults:
        raise InputError(
            f"cannot read {VARIABLE}={text!r}: {', '.join(faults)}; "
            f"write a level ({', '.join(LEVELS)}), or part=level as in runtime=debug"
        )
    return levels


def configure(text: str, *, stream: TextIO | None = None) -> None:
    """Print fxpipe's records from these levels on; an empty text goes back to silence.

    May be called again: the latest call counts.
    """
    levels = parse_levels(text)
    root = logging.getLogger(_ROOT)
    for handler in [found for found in root.handlers if isinstance(found, _Lines)]:
        root.removeHandler(handler)
        for name in handler.names:
            logging.getLogger(name).setLevel(logging.NOTSET)
    root.propagate = True
    if not levels:
        return
    levels.setdefault(_ROOT, logging.WARNING)
    root.addHandler(_Lines(stream, tuple(levels)))
    # The records have been printed: a handler of the program's own would print them twice.
    root.propagate = False
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def configure_from_environment() -> None:
    """Do what FXPIPE_LOG says; a value that cannot be read is a warning, not an error."""
    logging.getLogger(_ROOT).addHandler(logging.NullHandler())
    try:
        configure(os.environ.get(VARIABLE, ""))
    except InputError as error:
        warnings.warn(str(error), stacklevel=2)


class _Lines(logging.StreamHandler[TextIO]):
    """Writes records as lines and knows which loggers were set up together with it."""

    def __init__(self, stream: TextIO | None, names: tuple[str, ...]) -> None:
        super().__init__(stream or sys.stderr)
        self.names = names
        self.setFormatter(_Readable())


class _Readable(logging.Formatter):
    """`12:03:11.204 rank 1 info runtime.session: message`, further lines indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        rank = os.environ.get("RANK")
        where = "" if rank is None else f"rank {rank} "
        name = record.name.removeprefix(f"{_ROOT}.")
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        head = f"{clock}.{int(record.msecs):03d} {where}{record.levelname.lower()} {name}: "
        return head + message.replace("\n", "\n    ")
