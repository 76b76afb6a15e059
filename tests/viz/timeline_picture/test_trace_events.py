import json
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from fxpipe.program import Edges, Program, simulate
from fxpipe.program.generators import SCHEDULES
from fxpipe.viz.timeline_picture.trace_events import write_trace_events
from tests.viz.timelines import lowered_timeline, sharded_timeline, timeline_of

# What the trace event format asks of each kind of event.
NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def events_of(timeline, **options):
    return json.loads(write_trace_events(timeline, **options))["traceEvents"]


TIMELINES = {name: partial(timeline_of, name) for name in SCHEDULES}
TIMELINES |= {"lowered": partial(lowered_timeline, "ZBVZeroBubble"), "sharded": sharded_timeline}


@pytest.fixture(params=TIMELINES)
def timeline(request):
    return TIMELINES[request.param]()


def test_events_follow_the_format(timeline):
    events = events_of(timeline)

    for event in events:
        assert set(event) == NEEDED[event["ph"]] | {"ph"}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert sum(event["ph"] == "X" for event in events) == len(timeline.spans)


def test_slices_of_a_thread_do_not_overlap(timeline):
    # Viewers drop or nest slices of a thread that overlap without containing each other.
    threads = {}
    for event in events_of(timeline):
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)

    for slices in threads.values():
        slices.sort(key=lambda e: (e["ts"], e["dur"]))
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_arrows_start_and_end_in_slices(timeline):
    events = events_of(timeline)
    slices = [event for event in events if event["ph"] == "X"]
    ends = [event for event in events if event["ph"] in "sf"]

    assert ends
    assert all(count == 2 for count in Counter(event["id"] for event in ends).values())
    for end in ends:
        assert any(
            (s["pid"], s["tid"]) == (end["pid"], end["tid"])
            and s["ts"] - 1e-3 <= end["ts"] <= s["ts"] + s["dur"] + 1e-3
            for s in slices
        )


def test_times_are_microseconds():
    timeline = simulate(Program.parse("rank 0: 0F0 0B0"))

    for unit, scale in (("", 1e3), ("s", 1e6), ("ms", 1e3), ("us", 1)):
        slices = [e for e in events_of(timeline, time_unit=unit) if e["ph"] == "X"]
        assert [(e["ts"], e["dur"]) for e in slices] == [(0, scale), (scale, 2 * scale)]


def test_ranks_and_threads_have_names():
    events = events_of(lowered_timeline("1F1B"))
    names = [
        (e["name"], e["pid"], e["args"]["name"]) for e in events if e["name"].endswith("_name")
    ]

    assert ("process_name", 2, "rank 2") in names
    assert {name for kind, _, name in names if kind == "thread_name"} >= {
        "compute",
        "send",
        "receive",
    }


def test_memory_is_a_counter():
    timeline = timeline_of("1F1B")

    counters = [e for e in events_of(timeline) if e["ph"] == "C" and e["pid"] == 0]

    assert [(e["ts"] / 1e3, e["args"]["held"]) for e in counters] == list(timeline.memory[0])


def test_measured_ranks_are_processes_below_the_simulated_ones():
    events = events_of(timeline_of("1F1B", 2, 2), measured=timeline_of("GPipe", 2, 2))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}

    assert [names[pid] for pid in sorted(names, key=order.get)] == [
        "rank 0",
        "rank 0 (measured)",
        "rank 1",
        "rank 1 (measured)",
    ]
    ids = [e["id"] for e in events if e["ph"] == "s"]
    assert len(ids) == len(set(ids))


def test_skip_edges_have_arrows():
    program = Program.parse("rank 0: 0F0\nrank 1: 1F0\nrank 2: 2F0")
    edges = Edges.of(3, [(0, 1), (1, 2), (0, 2)])

    events = events_of(simulate(program, edges=edges), edges=edges)

    assert sum(event["ph"] == "s" for event in events) == 3
