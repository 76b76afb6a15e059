"""`fxpipe report`: one HTML file."""

from pathlib import Path

import pytest

from tests.cli.run import fails, fxpipe


def test_a_model_with_all_schedules_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"

    fxpipe(
        "report", "gpt", "-p", "2", "--split", "blocks.1,blocks.2,blocks.3",
        "-m", "2,4", "--out", str(path),
    )  # fmt: skip

    text = path.read_text()
    assert "ZBVZeroBubble, 4 microbatches" in text
    assert "VMin, 2 microbatches" in text
    assert ">1F1B, " not in text
    assert "gpt, 4 stages on 2 ranks" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_schedules_alone_and_a_program_from_a_file(tmp_path: Path) -> None:
    program, path = tmp_path / "mine.csv", tmp_path / "report.html"
    program.write_text("0F0,0B0\n1F0,1B0\n")

    text = fxpipe(
        "report", "-p", "2", "--schedule", "1f1b", "--schedule", str(program), "-o", str(path)
    )

    assert text == f"wrote {path}\n"
    assert "mine, 1 microbatches" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "blocks.1"), "--split, --inputs and --seq are for a model; name one"),
        (("-m", "4,x"), "--microbatches is a number from 1 up, or several with commas; got '4,x'"),
        (("-m", "0"), "--microbatches is a number from 1 up"),
        (("-p", "2", "-s", "3"), "the number of stages must be a multiple of 2"),
        (("--schedule", "zbv", "-s", "4"), "ZBVZeroBubble is not defined for these sizes"),
        (("--out", "report.pdf"), "a report is an HTML file"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("report", *arguments)
