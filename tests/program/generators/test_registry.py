"""Names lead to schedules, and what is said about a schedule is true."""

from __future__ import annotations

import dataclasses

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.program.action import Kind
from fxpipe.program.generators import SCHEDULES, ScheduleInfo, _key, get_schedule

TORCH_NAMES = [
    "1F1B",
    "Interleaved1F1B",
    "GPipe",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_names_are_names_here(name):
    assert get_schedule(name).name == name
    assert get_schedule(f"Schedule{name}").name == name
    assert get_schedule(name.swapcase()).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("zb-h1", "ZBH1"),
        ("zb_h2", "ZBH2"),
        ("ZB1P", "InterleavedZeroBubble"),
        ("zbv", "ZBVZeroBubble"),
        ("interleaved 1f1b", "Interleaved1F1B"),
        ("_ScheduleForwardOnly", "ForwardOnly"),
        ("v-half", "VHalf"),
        ("V_Min", "VMin"),
        ("hanayo", "Wave"),
        ("dualpipe-v", "DualPipeV"),
        ("looped-bfs", "LoopedBFS"),
        ("one_f_one_b", "1F1B"),
        ("interleaved_one_f_one_b", "Interleaved1F1B"),
    ],
)
def test_spelling_is_forgiven(spelling, name):
    assert get_schedule(spelling).name == name


def test_names_and_aliases_are_unambiguous():
    keys = [_key(n) for info in SCHEDULES.values() for n in (info.name, *info.aliases)]

    assert len(keys) == len(set(keys))


def test_unknown_name_lists_the_closest_and_all():
    with pytest.raises(ScheduleError, match=r"no schedule '1F2B'; did you mean 1F1B") as caught:
        get_schedule("1F2B")

    assert all(name in str(caught.value) for name in SCHEDULES)


@pytest.mark.parametrize("name", ["", "schedule", "qqqqqqqq", None, 3])
def test_nonsense_is_refused_without_a_guess(name):
    with pytest.raises(ScheduleError, match=r"there is no schedule .*; known: ForwardOnly, GPipe"):
        get_schedule(name)


@pytest.mark.parametrize("info", SCHEDULES.values(), ids=SCHEDULES)
def test_info_is_true(info: ScheduleInfo):
    for stages_per_rank in range(1, 6):
        num_stages = 3 * stages_per_rank
        if not info.allows(stages_per_rank):
            with pytest.raises(ScheduleError, match=info.name):
                info(3, num_stages, 4)
            continue

        program = info(3, num_stages, 4)

        kinds = {
            part.kind for actions in program.ranks for a in actions for part in (a.parts or (a,))
        }
        assert program.name == info.name
        assert program.placement == info.placement(3, num_stages)
        assert (Kind.BACKWARD_WEIGHT in kinds) == info.splits_backward
        assert info.description.endswith(".")
        assert info.when_to_use.endswith(".")


def test_info_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SCHEDULES["GPipe"].name = "other"
    with pytest.raises(TypeError):
        SCHEDULES["Mine"] = SCHEDULES["GPipe"]
