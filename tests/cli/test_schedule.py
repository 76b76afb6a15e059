"""`fxpipe schedule`: list, show, check, convert."""

import itertools
import json
from pathlib import Path

import pytest

from fxpipe.program import Program
from fxpipe.program.generators import SCHEDULES, get_schedule
from tests.cli.run import fails, fxpipe, fxpipe_json

ONE_F_ONE_B = get_schedule("1F1B")(2, 2, 3)


def test_every_schedule_is_listed() -> None:
    text = fxpipe("schedule", "list")
    listed = fxpipe_json("schedule", "list")

    assert [entry["name"] for entry in listed] == list(SCHEDULES)
    assert all(name in text for name in SCHEDULES)
    assert listed[2]["aliases"] == ["OneFOneB", "PipeDreamFlush"]


def test_show_prints_the_program_and_its_figures() -> None:
    text = fxpipe("schedule", "show", "1f1b", "-p", "2", "-m", "3")

    info = get_schedule("1F1B")
    assert text == (
        "1F1B: 2 ranks, 2 stages, 3 microbatches, 12 actions\n"
        f"{info.description} {info.when_to_use}\n"
        "with equal costs: idle 25.0%, peak memory 2 microbatches of a rank; 6 F, 6 B\n"
        "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\n"
        "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n"
    )


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_show_chooses_sizes_that_the_schedule_allows(name: str) -> None:
    program = Program.from_json(fxpipe("schedule", "show", name, "--json"))

    assert (program.name, program.num_ranks, program.num_microbatches) == (name, 4, 8)


def test_show_writes_a_program_alone_with_its_transfers() -> None:
    text = fxpipe("schedule", "show", "1F1B", "-p", "2", "-m", "3", "--lower", "--format", "csv")

    assert Program.from_csv(text).is_lowered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F2B",), "there is no schedule '1F2B'; did you mean 1F1B"),
        (("ZBV", "-p", "2", "-s", "2"), "the nearest legal number of stages on 2 ranks is 4"),
        (("missing.csv",), "there is no file missing.csv"),
    ],
)
def test_show_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("schedule", "show", *arguments)


def test_a_file_has_sizes_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(ONE_F_ONE_B.to_csv())

    message = fails("schedule", "show", str(path), "-p", "4", "-m", "3")

    assert "mine.csv has sizes of its own: 4 ranks asked for, 2 in the file" in message


def test_check_accepts_a_valid_file_in_each_format(tmp_path: Path) -> None:
    for name, text in (
        ("mine.csv", ONE_F_ONE_B.to_csv()),
        ("mine.json", ONE_F_ONE_B.to_json()),
        ("mine.txt", str(ONE_F_ONE_B)),
    ):
        path = tmp_path / name
        path.write_text(text)

        assert "is valid: 2 ranks, 2 stages, 3 microbatches" in fxpipe(
            "schedule", "check", str(path)
        )


def test_check_reads_standard_input() -> None:
    assert "- is valid" in fxpipe("schedule", "check", "-", text=ONE_F_ONE_B.to_csv())


def test_check_lists_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")

    message = fails("schedule", "check", str(path))
    found = fxpipe_json("schedule", "check", str(path), code=1)

    assert "missing work" in message and "0B1" in message
    assert not found["is_valid"]
    assert found["faults"][0]["action"] == "0B1"
    assert found["faults"][0]["kind"] == "missing work"


def test_check_names_the_cell_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0X0\n1F0,1B0\n")

    message = fails("schedule", "check", str(path))

    assert "mine.csv: the program cannot be read" in message
    assert "row 1, column 2 (rank 0)" in message


def test_convert_keeps_the_program_through_all_formats(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.csv", "b.json", "c.txt", "d.csv")]
    Path(files[0]).write_text(ONE_F_ONE_B.to_csv())

    for source, target in itertools.pairwise(files):
        assert fxpipe("schedule", "convert", source, target) == f"wrote {target}\n"

    assert Path(files[-1]).read_text() == Path(files[0]).read_text()


def test_convert_adds_transfers_or_idle_steps(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text(ONE_F_ONE_B.to_csv())

    lowered = fxpipe("schedule", "convert", str(source), "-", "--lower", "--format", "csv")
    idle = fxpipe("schedule", "convert", str(source), "-", "--idle", "--format", "csv")

    assert Program.from_csv(lowered).is_lowered
    assert Program.from_csv(idle).ranks == ONE_F_ONE_B.ranks
    assert ",," in idle


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("to.xml",), "cannot tell what to write to 'to.xml': end it with .csv, .json or .txt"),
        (("to.json", "--idle"), "--idle is for CSV without transfers"),
    ],
)
def test_convert_refuses(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    source = tmp_path / "a.csv"
    source.write_text(ONE_F_ONE_B.to_csv())

    assert message in fails("schedule", "convert", str(source), *arguments)


def test_convert_checks_the_program(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    data = json.loads(ONE_F_ONE_B.to_json())
    data["ranks"][0] = data["ranks"][0][:-1]
    source.write_text(json.dumps(data))

    assert "missing work" in fails("schedule", "convert", str(source), str(tmp_path / "b.csv"))
    assert not (tmp_path / "b.csv").exists()
