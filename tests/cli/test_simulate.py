"""`fxpipe simulate`: figures, timelines and comparisons."""

import json
from pathlib import Path

import pytest

from fxpipe.program.generators import SCHEDULES
from tests.cli.run import fails, fxpipe, fxpipe_json


def test_one_schedule_is_drawn_in_the_terminal() -> None:
    text = fxpipe("simulate", "1F1B", "-p", "2", "-m", "2")

    assert [line.split("|")[:2] for line in text.splitlines()[:4]] == [
        ["1F1B, 2 ranks, 2 microbatches"],
        ["makespan 9, idle 33.3%, peak memory 2"],
        ["rank 0 ", "F0-F1-      B0====   B1===="],
        ["rank 1 ", "   F0-B0====F1-B1====      "],
    ]


def test_figures_follow_the_costs() -> None:
    found = fxpipe_json(
        "simulate", "1F1B", "-p", "2", "-m", "2", "--forward", "1,2", "--input", "0.5",
        "--weight", "0.5", "--transfer", "0.25", "--no-overlap",
    )  # fmt: skip

    # rank 1: 1.25 until the first value is here, then 2 x (2 + 1), one gradient sent in
    # between and the last one at the end, which rank 0 still goes backward with.
    assert found["makespan"] >= 1 + 2 * 3 + 1 + 2 * 0.25
    assert found["num_ranks"] == 2
    assert len(found["peak_memory"]) == 2


def test_all_schedules_are_compared() -> None:
    sizes = ("-p", "4", "-m", "8", "-s", "8")
    rows = fxpipe_json("simulate", "--all", *sizes, "--input", "1.4", "--memory", "4")
    table = fxpipe("simulate", "--all", *sizes)
    text = fxpipe("simulate", "1F1B", "GPipe", "-p", "2")

    assert {row["schedule"] for row in rows} == {
        name for name, info in SCHEDULES.items() if info.allows(2) and name != "ForwardOnly"
    }
    fitting = [row for row in rows if row["fits"]]
    assert fitting == rows[: len(fitting)] and 0 < len(fitting) < len(rows)
    assert [row["makespan"] for row in fitting] == sorted(row["makespan"] for row in fitting)
    assert "4 ranks, 8 microbatches" in table and "VMin" in table
    assert "over 4" in fxpipe("simulate", "--all", *sizes, "--input", "1.4", "--memory", "4")
    assert "once started" in text and "GPipe" in text


def test_pictures_are_written(tmp_path: Path) -> None:
    one, many = tmp_path / "new" / "one.svg", tmp_path / "many.json"

    fxpipe("simulate", "ZBV", "-p", "2", "--out", str(one))
    found = fxpipe_json("simulate", "1F1B", "GPipe", "-p", "2", "--out", str(many))

    assert one.read_text().startswith("<svg") or "<svg" in one.read_text()[:200]
    assert [Path(row["picture"]).name for row in found] == ["many-1F1B.json", "many-GPipe.json"]
    assert json.loads((tmp_path / "many-1F1B.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a schedule, a file, or say --all"),
        (("1F1B", "--all"), "--all compares all schedules; name some"),
        (("--all", "--out", "a.svg"), "--all compares all schedules; name some"),
        (("--all", "-p", "4", "-s", "6"), "6 stages do not spread evenly over 4 ranks"),
        (("1F1B", "--memory", "4"), "--memory is for --all"),
        (("1F1B", "--forward", "x"), "--forward is a number, or numbers with commas; got 'x'"),
        (("1F1B", "--weight", "-1"), "--weight needs numbers from 0 up"),
        (("1F1B", "-p", "2", "--input", "1,2,3"), "--input has 3 times for 2 stages"),
        (("1F1B", "--out", "timeline.xyz"), "cannot draw a timeline as 'timeline.xyz'"),
        (("nope.csv",), "there is no file nope.csv"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("simulate", *arguments)


def test_sizes_below_one_are_wrong_usage() -> None:
    assert "--ranks" in fails("simulate", "1F1B", "--ranks", "0", code=2)
