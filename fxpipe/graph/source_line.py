"""Where in the user's code something happens.

`user_frame` looks at the running stack, `failing_frame` at the traceback of an
exception. Both skip fxpipe's own files and torch's. The other functions write what a trace
says when it cannot go on there: what was found, where, and what to do.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import linecache
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TypeAlias

import torch

from fxpipe import torch_inside

__all__ = [
    "Place",
    "a_decisive_draw",
    "a_draw",
    "a_value_decides",
    "an_effect",
    "an_unknown_tensor",
    "failing_frame",
    "is_compared",
    "is_message",
    "is_ours",
    "is_users",
    "user_depth",
    "user_frame",
]


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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Place("<unknown>", 0)


def user_depth() -> int:
    """Return how many frames above the caller the user's code is, from 1, as for a warning."""
    depth = 1
    frame = sys._getframe(1)
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


# What these functions are told, they report: it decides nothing.
_REPORTS = {
    "torch_compilable_check", "_check", "_assert", "print", "warn", "warning", "warning_once",
    "info", "debug", "error", "critical", "exception", "log",
}  # fmt: skip


def is_message(frame: FrameType) -> bool:
    """Say whether the f-string that a frame makes now goes straight to a function that reports."""
    here = _running_part(frame)
    return here is not None and any(
        first <= here[0] and here[1] <= last for first, last in _messages(frame.f_code.co_filename)
    )


def is_compared() -> bool:
    """Say whether the call that the user's code makes now is one side of a comparison."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return False
    return _running_part(frame) in _compared(frame.f_code.co_filename)


_Part: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


def _running_part(frame: FrameType) -> _Part | None:
    """Return where the expression begins and ends that a frame computes now."""
    positions = frame.f_code.co_positions()
    line, end_line, column, end_column = next(itertools.islice(positions, frame.f_lasti // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return (line, column), (end_line, end_column)


@functools.lru_cache(maxsize=64)
def _messages(file: str) -> frozenset[_Part]:
    """Return from where to where f-strings go that are arguments of functions which report."""
    return frozenset(
        _part(text)
        for call in _nodes(file)
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", getattr(call.func, "id", "")) in _REPORTS
        for text in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(text, ast.JoinedStr)
    )


@functools.lru_cache(maxsize=64)
def _compared(file: str) -> frozenset[_Part]:
    """Return from where to where calls go whose result is compared with one other value."""
    return frozenset(
        _part(side)
        for node in _nodes(file)
        if isinstance(node, ast.Compare) and len(node.ops) == 1
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq))
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Call)
    )


def _nodes(file: str) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(ast.parse("".join(linecache.getlines(file))))
    except SyntaxError:
        return


def _part(node: ast.expr) -> _Part:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def a_value_decides(who: str, place: Place | None) -> str:
    """Say that the value of a tensor decides."""
    where = f"\n  {place}\n    {place.source}" if place is not None else ""
    return (
        f"the value of a tensor decides what {who} does next, so it cannot be captured as "
        f"a graph here{where}\n"
        "keep this code inside a submodule that is not split (fxpipe leaves those as they "
        "are), move the split, or compute the decision from sizes or constants"
    )


def a_draw(place: Place) -> str:
    """Say that opened code uses a random number that is not torch's."""
    return (
        "code that is split draws a random number from Python or numpy, which would be the "
        f"same in every run of a stage\n  at or before {place}\n    {place.source}\n"
        "use torch.rand, keep this code inside a submodule that is not split, or turn it off "
        "(a rate of zero is fine)"
    )


def a_decisive_draw(place: Place, rates: Sequence[str]) -> str:
    """Say that a random number decides which opened code runs; `rates` are what it is held to."""
    setting = " and ".join(rates) or "the rate of LayerDrop or stochastic depth"
    return (
        "a random number decides which part of the model runs, and the graph of a stage has one "
        f"way\n  {place}\n    {place.source}\n"
        f"set {setting} to 0, or keep this code inside a submodule that is not split"
    )


def an_effect(what: str, place: Place) -> str:
    """Say that code does something which a graph cannot repeat."""
    return (
        f"code that is split does something that cannot be written as a graph: {what}\n  {place}\n"
        f"    {place.source}\nkeep this code inside a submodule that is not split"
    )


def an_unknown_tensor(place: Place) -> str:
    """Say that no recorded operation made a tensor."""
    return (
        f"a tensor used at {place} was made by code that fxpipe cannot see\n"
        "move that code into a submodule that is not split, or register the tensor as a buffer"
    )
