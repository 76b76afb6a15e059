from itertools import pairwise

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.program import Edges, Program, lower, simulate
from fxpipe.viz.timeline_picture.spans import (
    Words,
    find_dependencies,
    nice_ticks,
    number_lanes,
)
from tests.viz.timelines import lowered_timeline


def named(timeline, edges=None):
    texts = [f"{span.rank}:{span.action}" for span in timeline.spans]
    found = find_dependencies(timeline.spans, edges)
    return {text: [texts[i] for i in sources] for text, sources in zip(texts, found, strict=True)}


PROGRAM = Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")


def test_compute_waits_for_the_compute_of_another_rank():
    assert named(simulate(PROGRAM)) == {
        "0:0F0": [],
        "1:1F0": ["0:0F0"],
        "1:1B0": ["1:1F0"],
        "0:0B0": ["1:1B0", "0:0F0"],
    }


def test_with_transfers_compute_waits_for_its_receive():
    assert named(simulate(lower(PROGRAM))) == {
        "0:0F0": [],
        "0:0SEND_F0": ["0:0F0"],
        "1:1RECV_F0": ["0:0SEND_F0"],
        "1:1F0": ["1:1RECV_F0"],
        "1:1B0": ["1:1F0"],
        "1:1SEND_B0": ["1:1B0"],
        "0:0RECV_B0": ["1:1SEND_B0"],
        "0:0B0": ["0:0RECV_B0", "0:0F0"],
    }


def test_skips_are_dependencies_too():
    program = Program.parse("rank 0: 0F0\nrank 1: 1F0\nrank 2: 2F0")
    edges = Edges.of(3, [(0, 1), (1, 2), (0, 2)])

    assert named(simulate(program, edges=edges), edges)["2:2F0"] == ["0:0F0", "1:1F0"]


def test_pair_waits_for_what_its_parts_read():
    program = Program.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1")

    found = named(simulate(program))

    assert found["1:(1F1;1B0)OVERLAP_F_B"] == ["0:0F1", "1:1F0"]
    assert found["0:0B0"] == ["1:(1F1;1B0)OVERLAP_F_B", "0:0F0"]


def test_lanes_hold_what_does_not_overlap():
    spans = lowered_timeline("ZBVZeroBubble").spans

    lanes = number_lanes(spans, lambda span: None if span.is_compute else span.rank)

    assert [lane == -1 for lane in lanes] == [span.is_compute for span in spans]
    assert max(lanes) > 0
    groups = {}
    for lane, span in zip(lanes, spans, strict=True):
        groups.setdefault((span.rank, lane), []).append(span)
    for same in (sorted(found, key=lambda span: span.start) for found in groups.values()):
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(same))


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("", 25.5, "25.5"),
        ("", 0, "0"),
        ("layers", 3, "3 layers"),
        ("ms", 12.3456, "12.3 ms"),
        ("ms", 0.0123, "12.3 us"),
        ("s", 0.25, "250 ms"),
        ("us", 2_500_000, "2.5 s"),
        ("bytes", 0, "0 B"),
        ("bytes", 512, "512 B"),
        ("bytes", 4096, "4.1 kB"),
        ("bytes", 1.5 * 2**30, "1.61 GB"),
    ],
)
def test_value_has_the_unit_that_reads_best(unit, value, text):
    assert Words(time_unit=unit).time(value) == Words(memory_unit=unit).memory(value) == text


def test_unit_must_be_a_word():
    with pytest.raises(FxpipeError, match="a unit is a word such as 'ms' or 'bytes', got 3"):
        Words(memory_unit=3)


@pytest.mark.parametrize("end", [1e-6, 0.3, 1, 7, 33, 1234.5, 9e9])
@pytest.mark.parametrize("most", [1, 4, 12])
def test_ticks_are_few_even_and_within_the_range(end, most):
    ticks = nice_ticks(end, most)

    assert ticks[0] == 0
    assert ticks[-1] <= end * 1.001
    assert len(ticks) <= most + 1
    steps = {round((b - a) / end, 9) for a, b in pairwise(ticks)}
    assert len(steps) <= 1


def test_ticks_of_an_empty_range():
    assert nice_ticks(0, 5) == [0.0]
