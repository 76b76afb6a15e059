"""Where in the user's code something happens.

`user_frame` looks at the running stack, `failing_frame` at the traceback of an
exception. Both skip fxpipe's own files and torch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import sys
from typing import Any

import torch

from fxpipe import torch_inside

__all__ = ["Place", "failing_frame", "is_ours", "is_users", "user_depth", "user_frame"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_OURS = (__file__.rpartition("/")[0] + "/", str(torch_inside.__file__))
_TORCH = torch.__file__.rpartition("/")[0] + "/"
_CONTEXTS = contextlib.__file__  # it is on the stack wherever a `with` is


def user_frame() -> Place:
    """Return the innermost line on the stack that is neither ours nor torch's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Place("<unknown>", 0)


def user_depth() -> int:
    """Return how many frames above the caller the user's code is, from 1, as for a warning."""
    depth = 1
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back
    return depth


def failing_frame(error: BaseException) -> Place | None:
    """Return the innermost line of the user's code that an exception came through."""
    found: Place | None = None
    step = error.__traceback__
    while step is not None:
        if is_users(step.tb_frame.f_code.co_filename):
            found = Place(step.tb_frame.f_code.co_filename, step.tb_lineno)
        step = step.tb_next
    return found


def is_ours(file: str) -> bool:
    """Say whether a file is of the part of fxpipe that traces."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Say whether a file is neither ours nor torch's."""
    return not file.startswith((*_OURS, _TORCH, _CONTEXTS, "<"))
