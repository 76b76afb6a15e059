"""Programs by the name of a schedule, or from a file.

In:  a name ("1F1B") with sizes, a path (.csv, .json, or the text table), or "-".
Out: a `Program`, read and not yet judged.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fxpipe.errors import InputError, ScheduleError
from fxpipe.program import Program
from fxpipe.program.generators import get_schedule

__all__ = ["find_program", "is_file_name", "read_program", "sizes_of", "sizes_text"]

_ENDINGS = (".csv", ".json", ".txt")


def find_program(
    name: str,
    *,
    ranks: int | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
) -> Program:
    """The program that a user means.

    For a schedule, sizes that are not given are 4 ranks, as few stages per rank as the
    schedule is made for (two if it allows any number), and two microbatches per rank. A file
    has its own sizes: those that are given must agree.

    Raises:
        ScheduleError: no such schedule, or not for these sizes, or the file is malformed.
        InputError: there is no such file, or it has other sizes than the given ones.
    """
    if not is_file_name(name):
        info = get_schedule(name)
        ranks = 4 if ranks is None else ranks
        if stages is None:
            least, most = info.stages_per_rank
            stages = ranks * (least if most is not None else max(least, 2))
            stages = ranks if info.name == "ForwardOnly" else stages
        microbatches = 2 * ranks if microbatches is None else microbatches
        return info(ranks, stages, microbatches)
    program = read_program(name)
    wrong = [
        f"{given} {name.removeprefix('num_')} asked for, {found} in the file"
        for given, (name, found) in zip(
            (ranks, stages, microbatches), sizes_of(program).items(), strict=True
        )
        if given is not None and given != found
    ]
    if wrong:
        raise InputError(f"{name} has sizes of its own: {'; '.join(wrong)}")
    return program


def sizes_of(program: Program) -> dict[str, int]:
    """The sizes of a program by name, for JSON."""
    names = ("num_ranks", "num_stages", "num_microbatches")
    return {name: getattr(program, name) for name in names}


def sizes_text(program: Program) -> str:
    """Such as "4 ranks, 8 stages, 16 microbatches"."""
    named = ((size, name.removeprefix("num_")) for name, size in sizes_of(program).items())
    return ", ".join(f"{size} {name}" for size, name in named)


def is_file_name(name: str) -> bool:
    """Whether a name means a file rather than a schedule."""
    return name == "-" or name.lower().endswith(_ENDINGS) or "/" in name


def read_program(name: str) -> Program:
    """Read a program from a file, or from standard input if the name is "-".

    It may be CSV, JSON or the text table, whatever the name says.
    """
    path = Path("standard input" if name == "-" else name)
    try:
        text = sys.stdin.read() if name == "-" else path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file {name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {name}: {error}") from None
    stripped = text.lstrip()
    try:
        if stripped.startswith("{"):
            return Program.from_json(text)
        if stripped.startswith("rank"):
            return Program.parse(text, name=path.stem)
        return Program.from_csv(text, name=path.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
