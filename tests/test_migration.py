"""The table of docs/migration.md holds: its names exist on both sides, with these arguments."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as peer
from torch.distributed.pipelining import _IR, _utils, microbatch, schedules, stage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops as peer_ops
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpipe
import fxpipe.microbatch
import fxpipe.schedules
from fxpipe.compat import get_schedule_ops

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


def rows(ops, name, num_ranks, num_microbatches):
    """The compute actions of each rank as text, listed by `ops`, torch's function or ours."""
    listed = ops(name, num_ranks, num_microbatches)
    return [[str(a) for a in row if a is not None and "REDUCE" not in str(a)] for row in listed]


@pytest.mark.parametrize("sizes", [(2, 4), (2, 8), (4, 8), (4, 12)], ids=str)
def test_orders_are_those_of_torch_but_for_what_the_page_names(sizes):
    for name in ("GPipe", "Interleaved1F1B", "DualPipeV"):
        assert rows(get_schedule_ops, name, *sizes) == rows(peer_ops, name, *sizes)
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        for ours, theirs in zip(
            rows(get_schedule_ops, name, *sizes), rows(peer_ops, name, *sizes), strict=True
        ):
            assert [a for a in ours if "W" not in a] == [a for a in theirs if "W" not in a]
            halves = [[a for a in row if "W" in a] for row in (ours, theirs)]
            of_stage = [sorted(row, key=lambda a: a.partition("W")[0]) for row in halves]
            assert of_stage[0] == of_stage[1]  # each stage's in the same order
    for ours, theirs in zip(
        rows(get_schedule_ops, "LoopedBFS", *sizes),
        rows(peer_ops, "LoopedBFS", *sizes),
        strict=True,
    ):
        half, count = len(theirs) // 2, sizes[1]
        for start in range(half, len(theirs), count):
            theirs[start : start + count] = reversed(theirs[start : start + count])
        assert ours == theirs


@pytest.fixture
def one_of_two() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def objects(package: Any, classes: Any) -> list[Any]:
    """A stage, schedules, a pipe, its description and a stage of it, made by either package."""
    x = torch.zeros(2, 4)

    def stage(index: int, count: int) -> Any:
        shapes = {"input_args": (x,), "output_args": (x,)}
        return package.PipelineStage(nn.Linear(4, 4), index, count, torch.device("cpu"), **shapes)

    pipe = package.pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        (x,),
        split_spec={"1": package.SplitPoint.BEGINNING},
    )
    single = [classes.get_schedule_class(name)(stage(0, 2), 8) for name in ("GPipe", "1F1B")]
    looped = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
    placed = [(name, (0, 2)) for name in looped] + [
        (name, (0, 3)) for name in ("ZBVZeroBubble", "DualPipeV")
    ]
    several = [
        classes.get_schedule_class(name)([stage(i, 4) for i in indices], 8)
        for name, indices in placed
    ]
    built = pipe.build_stage(0, torch.device("cpu"))
    return [stage(0, 2), *single, *several, pipe, pipe.info(), built]


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # torch's export of its own
def test_public_attributes_are_here_or_named_as_missing(one_of_two: None) -> None:
    section = PAGE.partition("## What has no counterpart")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))

    for theirs, ours in zip(
        objects(peer, schedules), objects(fxpipe, fxpipe.schedules), strict=True
    ):
        public = {name for name in dir(theirs) if not name.startswith("_")}
        assert public - set(dir(ours)) <= named, type(theirs).__name__
