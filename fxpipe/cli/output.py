"""What the commands print: results to standard output, everything else to standard error.

Tables and pictures are for people; with `--json` standard output carries one JSON text and
nothing else. Bars and spinners appear only where somebody is looking.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fxpipe.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

__all__ = [
    "bar",
    "err",
    "examples",
    "make_table",
    "out",
    "print_error",
    "print_json",
    "text_to_write",
    "working",
    "writable",
]

_WIDTH_OF_FILES = 120


def out() -> Console:
    """The console of standard output."""
    return _console(to_stderr=False)


def err() -> Console:
    """The console of standard error."""
    return _console(to_stderr=True)


def _console(*, to_stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    # rich takes 80 columns for a file or a pipe, and would break the lines of wide tables.
    return Console(stderr=to_stderr, highlight=False, width=_WIDTH_OF_FILES)


def print_json(data: Any) -> None:
    """Print data for a program to read."""
    typer.echo(json.dumps(data, indent=2))


def print_error(error: BaseException) -> None:
    """Print what went wrong, without a traceback."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    rank = os.environ.get("RANK")
    head = "error:" if rank is None else f"rank {rank}, error:"
    typer.echo(f"{typer.style(head, fg='red', bold=True)} {error}{notes}", err=True)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table; a column whose name ends with `#` is aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # A shape such as [batch, 8] would be read as markup, and vanish.
    heading = Text(title) if title else None
    table = Table(title=heading, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    for column in columns:
        justify: Any = "right" if column.endswith("#") else "left"
        # Folded, not cut: on a narrow terminal nothing is lost.
        table.add_column(column.removesuffix("#"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on standard error while something takes its time."""
    console = err()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def bar(console: Console) -> Progress:
    """A progress bar; nothing at all where nobody is looking."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def examples(*commands: str) -> str:
    """The end of a help text: commands to copy, one on a line however long."""
    return "\n".join(("\b", "Examples:", *(f"  {command}" for command in commands)))


def text_to_write(text: str, path: Path | None) -> None:
    """Write text to a file, or to standard output if there is no path or it is "-"."""
    if path is None or str(path) == "-":
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        return
    writable(path).write_text(text, encoding="utf-8")


def writable(path: Path) -> Path:
    """The path, its folder made if need be; asked before the work that fills the file.

    Raises:
        InputError: the file cannot be written.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path
