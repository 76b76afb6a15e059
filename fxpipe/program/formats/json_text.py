"""Read and write the JSON form of a program, strictly.

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

Every key must be there and no other; cells are checked by `parse_rows`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fxpipe.errors import ScheduleError

__all__ = ["ProgramFields", "read_json", "write_json"]

_FORMAT = "fxpipe.program"
_VERSION = 1


class ProgramFields(NamedTuple):
    """What the JSON form holds."""

    name: str
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    ranks: Sequence[Sequence[str]]


def write_json(fields: ProgramFields) -> str:
    """JSON with one line per rank."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": fields.name,
        "num_microbatches": fields.num_microbatches,
        "stage_to_rank": list(fields.stage_to_rank),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    ranks = ",\n".join(f"    {json.dumps(list(row))}" for row in fields.ranks)
    lines.append(f'  "ranks": [\n{ranks}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_json(text: str) -> ProgramFields:
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
    return ProgramFields(
        data["name"], data["num_microbatches"], tuple(data["stage_to_rank"]), data["ranks"]
    )


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        doubled = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        raise ScheduleError(f"expected each key once, found several {doubled}")
    return data


def _is_int(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_ints(item: object) -> bool:
    return isinstance(item, list) and all(map(_is_int, item))


def _is_rows(item: object) -> bool:
    return isinstance(item, list) and all(
        isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in item
    )


_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "format": (lambda item: item == _FORMAT, repr(_FORMAT)),
    "version": (lambda item: _is_int(item) and item == _VERSION, str(_VERSION)),
    "name": (lambda item: isinstance(item, str), "a string"),
    "num_microbatches": (_is_int, "a whole number"),
    "stage_to_rank": (_is_ints, "a list with the rank of each stage"),
    "ranks": (_is_rows, "a list with a list of actions for each rank"),
}
