"""Read programs from text and JSON, strictly: every character must mean something.

In:  rows of cells, one row per rank, from a table, a CSV or JSON.
Out: one list of actions per rank, or a `ScheduleError` that lists every cell that
     cannot be read, with its row, column and what was expected there.

The text of an action is `str(action)`: stage, kind, microbatch, as in `2F0`.
Rows and columns are counted from 1, as spreadsheets do; row 1 is rank 0. In JSON every key
must be there and no other:

    {
      "format": "fxpipe.program",
      "version": 1,
      "name": "1F1B",
      "num_microbatches": 2,
      "stage_to_rank": [0, 1],
      "ranks": [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"]
      ]
    }
"""

from __future__ import annotations

import csv
import io
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Action, Kind, neighbour

__all__ = [
    "WAIT",
    "parse_action",
    "parse_rows",
    "read_json",
    "rows_of_csv",
    "rows_of_table",
    "write_csv",
    "write_json",
]

_NUMBER = "0|[1-9][0-9]*"
_KINDS = {kind.text: kind for kind in Kind if kind is not Kind.OVERLAP}
_ACTION = re.compile(
    rf"(?P<stage>{_NUMBER})"
    rf"(?P<kind>{'|'.join(sorted(_KINDS, key=len, reverse=True))})"
    rf"(?P<microbatch>{_NUMBER})?"
    rf"((?P<arrow>[<>])(?P<peer>{_NUMBER}))?"
)
WAIT = re.compile(
    rf"(?P<stage>{_NUMBER})(?P<kind>WAIT_(?:SEND_F|SEND_B|REDUCE_GRAD))(?P<microbatch>{_NUMBER})?"
)
"""What torch 2.15 adds when it lowers. It is no action here: whatever is begun is waited for."""
_PAIR = re.compile(rf"\((?P<parts>[^()]*)\){Kind.OVERLAP.text}")
_EXAMPLES = "expected an action such as 2F0, 1B3, 0SEND_F1, 1UNSHARD or (0F5;7B1)OVERLAP_F_B"


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ScheduleError: the text is not the text of an action; the message says what
            was expected instead.
    """
    pair = _PAIR.fullmatch(text)
    if pair:
        return _parse_pair(text, pair["parts"])
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r}: {_EXAMPLES}")
    kind = _KINDS[match["kind"]]
    stage = int(match["stage"])
    has_microbatch = match["microbatch"] is not None
    if has_microbatch != (kind.is_compute or kind.is_transfer or kind.is_offload):
        raise ScheduleError(
            f"{text!r}: {kind.text} is for a whole stage, expected {stage}{kind.text}"
            if has_microbatch
            else f"{text!r}: {kind.text} needs a microbatch, expected for example {text}0"
        )
    microbatch = int(match["microbatch"]) if has_microbatch else None
    if not kind.is_transfer:
        if match["arrow"]:
            raise ScheduleError(f"{text!r}: only transfers name a second stage")
        return Action(kind, stage, microbatch)
    arrow = ">" if kind.is_send else "<"
    if match["arrow"] not in (None, arrow):
        raise ScheduleError(f"{text!r}: expected {arrow!r} before the other stage of {kind.text}")
    peer = neighbour(kind, stage) if match["peer"] is None else int(match["peer"])
    if peer < 0:
        raise ScheduleError(f"{text!r}: no stage comes before stage {stage}")
    return Action(kind, stage, microbatch, peer)


def _parse_pair(text: str, inside: str) -> Action:
    parts = inside.split(";")
    if len(parts) != 2:
        raise ScheduleError(f"{text!r}: expected two actions in a pair, found {len(parts)}")
    try:
        first, second = (parse_action(part) for part in parts)
    except ScheduleError as error:
        raise ScheduleError(f"{text!r}: in the pair, {error}") from None
    for part in (first, second):
        if not part.kind.is_compute:
            raise ScheduleError(f"{text!r}: expected compute actions in a pair, found {part}")
    return Action.overlap(first, second)


def parse_rows(rows: Sequence[Sequence[str]]) -> list[list[Action]]:
    """The actions in each row; empty cells are idle steps and are left out, and so are waits.

    Raises:
        ScheduleError: lists every cell that cannot be read and every row without actions.
    """
    ranks: list[list[Action]] = []
    bad: list[str] = []
    for rank, row in enumerate(rows):
        actions: list[Action] = []
        for column, cell in enumerate(row):
            text = cell.strip(" ")
            if text and not WAIT.fullmatch(text):
                try:
                    actions.append(parse_action(text))
                except ScheduleError as error:
                    bad.append(f"row {rank + 1}, column {column + 1} (rank {rank}): {error}")
        if not any(cell.strip(" ") for cell in row):
            bad.append(f"row {rank + 1} (rank {rank}): expected at least one action, found none")
        ranks.append(actions)
    if not rows:
        bad.append("row 1 (rank 0): expected at least one action, found an empty text")
    if bad:
        raise ScheduleError("the program cannot be read:\n  " + "\n  ".join(bad))
    return ranks


def rows_of_csv(text: str) -> list[list[str]]:
    """The cells of a CSV with one row per rank.

    Raises:
        ScheduleError: the text is not a CSV.
    """
    rows: list[list[str]] = []
    try:
        rows.extend(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(
            f"row {len(rows) + 1} (rank {len(rows)}): expected comma-separated cells: {error}"
        ) from error
    return rows


def write_csv(rows: Sequence[Sequence[str]]) -> str:
    """The inverse of `rows_of_csv`."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def rows_of_table(text: str) -> list[list[str]]:
    """The cells of a table as `str(program)` writes it: `rank 0: 0F0 0F1 0B0 ...`.

    Raises:
        ScheduleError: a line does not start with the rank that is due.
    """
    lines = text.strip().splitlines()
    rows: list[list[str]] = []
    for rank, line in enumerate(lines):
        match = re.fullmatch(r"\s*rank +([0-9]+):(.*)", line)
        if match is None or match[1] != str(rank):
            raise ScheduleError(
                f"row {rank + 1}: expected 'rank {rank}: ' and its actions, found {line.strip()!r}"
            )
        rows.append(match[2].split())
    return rows


def write_json(fields: Mapping[str, object], rows: Sequence[Sequence[str]]) -> str:
    """JSON with one line per field and one per rank."""
    head = {**_HEAD, **fields}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    ranks = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    lines.append(f'  "ranks": [\n{ranks}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_json(text: str) -> dict[str, Any]:
    """The fields, checked for presence and type.

    Raises:
        ScheduleError: the text is not JSON, or lists all that is wrong with its keys.
    """
    try:
        data: object = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ScheduleError(
            f"row {error.lineno}, column {error.colno}: expected JSON: {error.msg}"
        ) from error
    if not isinstance(data, dict):
        raise ScheduleError(f"expected a JSON object with a program, found {reprlib.repr(data)}")
    bad = [
        f"{key!r}: expected {expected}, "
        f"found {reprlib.repr(data[key]) if key in data else 'no such key'}"
        for key, (is_right, expected) in _KEYS.items()
        if not is_right(data.get(key))
    ]
    bad += [f"{key!r}: not a key of a program" for key in data if key not in _KEYS]
    if bad:
        raise ScheduleError("the program cannot be read:\n  " + "\n  ".join(bad))
    return data


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        doubled = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        raise ScheduleError(f"expected each key once, found several {doubled}")
    return data


def _is_int(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_list(item: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(item, list) and all(map(holds, item))


_HEAD = {"format": "fxpipe.program", "version": 1}
_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "format": (lambda item: item == _HEAD["format"], repr(_HEAD["format"])),
    "version": (lambda item: _is_int(item) and item == _HEAD["version"], repr(_HEAD["version"])),
    "name": (lambda item: isinstance(item, str), "a string"),
    "num_microbatches": (_is_int, "a whole number"),
    "stage_to_rank": (
        lambda item: _is_list(item, _is_int),
        "a list with the rank of each stage",
    ),
    "ranks": (
        lambda item: _is_list(item, lambda row: _is_list(row, lambda c: isinstance(c, str))),
        "a list with a list of actions for each rank",
    ),
}
