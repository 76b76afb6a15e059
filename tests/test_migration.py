"""The table of docs/migration.md holds: its names exist on both sides, with these arguments."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from torch.distributed import pipelining as peer
from torch.distributed.pipelining import _IR, _utils, microbatch, schedules, stage

import fxpipe
import fxpipe.microbatch
import fxpipe.schedules

PAGE = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()
TABLE = PAGE.partition("| torch.distributed.pipelining | fxpipe |")[2].partition("\n\n")[0]
ROWS = [line.strip("|").split(" | ") for line in TABLE.splitlines()[2:]]
CALL = re.compile(r"`([\w.]+)(?:\(([^)]*)\))?`")


def found(name, homes):
    """What a dotted name stands for in the first home that has it."""
    first, *rest = name.split(".")
    for home in homes:
        value = getattr(home, first, None)
        if value is not None:
            for part in rest:
                value = getattr(value, part)
            return value
    raise AssertionError(f"{name} is in none of {[home.__name__ for home in homes]}")


def arguments(value):
    made = value.__init__ if inspect.isclass(value) else value
    return set(inspect.signature(made).parameters)


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40].strip() for row in ROWS])
def test_a_row_says_what_is_there(row):
    left, right, _ = row
    calls = CALL.findall(left)
    assert calls
    for name, given in calls:
        theirs = found(name, (peer, schedules, stage, microbatch, _IR, _utils))
        names = {argument.strip() for argument in given.split(",")} - {""}
        assert names <= arguments(theirs) if names else True
        if right.strip() == "the same":
            ours = found(name, (fxpipe, fxpipe.schedules, fxpipe.microbatch))
            assert names <= arguments(ours) if names else True
    for name, _ in CALL.findall(right):
        home, _, last = name.rpartition(".")
        assert hasattr(import_module(home), last), name


def test_the_table_has_rows():
    assert len(ROWS) > 15
