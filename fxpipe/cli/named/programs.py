"""Programs by the name of a schedule, or from a file.

In:  a name ("1F1B") with sizes, a path (.csv, .json, or the text table), or "-".
Out: a `Program`, read and not yet judged.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fxpipe.errors import InputError, ScheduleError
from fxpipe.program import Program
from fxpipe.program.generators import ScheduleInfo, get_schedule

__all__ = ["default_stages", "find_program", "is_file_name", "parse_program", "read_program"]

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
    schedule is made for, and two microbatches per rank. A file has its own sizes: those that
    are given must agree.

    Raises:
        ScheduleError: no such schedule, or not for these sizes, or the file is malformed.
        InputError: there is no such file, or it has other sizes than the given ones.
    """
    if not is_file_name(name):
        info = get_schedule(name)
        ranks = 4 if ranks is None else ranks
        stages = default_stages(info, ranks) if stages is None else stages
        microbatches = 2 * ranks if microbatches is None else microbatches
        return info(ranks, stages, microbatches)
    program = read_program(name)
    wrong = [
        f"{given} {what} asked for, {found} in the file"
        for what, given, found in (
            ("ranks", ranks, program.num_ranks),
            ("stages", stages, program.num_stages),
            ("microbatches", microbatches, program.num_microbatches),
        )
        if given is not None and given != found
    ]
    if wrong:
        raise InputError(f"{name} has sizes of its own: {'; '.join(wrong)}")
    return program


def is_file_name(name: str) -> bool:
    """Whether a name means a file rather than a schedule."""
    return name == "-" or name.lower().endswith(_ENDINGS) or "/" in name


def default_stages(info: ScheduleInfo, ranks: int) -> int:
    """The number of stages to show a schedule with: two per rank if it allows several."""
    least, most = info.stages_per_rank
    if info.name == "ForwardOnly":
        return ranks
    return ranks * (least if most is not None else max(least, 2))


def read_program(name: str) -> Program:
    """Read a program from a file, or from standard input if the name is "-"."""
    if name == "-":
        return parse_program(sys.stdin.read(), name="standard input")
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file {name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {name}: {error}") from None
    return parse_program(text, name=name)


def parse_program(text: str, *, name: str) -> Program:
    """A program from CSV, JSON or the text table, whichever the text is."""
    stripped = text.lstrip()
    title = Path(name).stem
    try:
        if stripped.startswith("{"):
            return Program.from_json(text)
        if stripped.startswith("rank"):
            return Program.parse(text, name=title)
        return Program.from_csv(text, name=title)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
