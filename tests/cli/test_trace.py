"""`fxpipe trace` and `fxpipe draw`."""

from pathlib import Path

import pytest

from tests.cli.run import fails, fxpipe, fxpipe_json


def test_stages_are_shown_with_what_they_hold_take_and_send() -> None:
    text = fxpipe("trace", "gpt", "--stages", "2", "--code")

    assert "blocks.0 … blocks.1 (2 × Block)" in text
    assert "ids (model input)" in text
    assert "float32[batch, sequence, 32] (2.05 kB) to 1" in text
    assert "tied: tokens.weight (0) = head.weight (1)" in text
    assert "def forward(self" in text


def test_the_same_for_programs() -> None:
    found = fxpipe_json("trace", "gpt", "--split", "blocks.1,blocks.3")

    assert found["num_stages"] == 3
    assert found["sizes"] == {"batch": 2, "sequence": 8}
    assert found["tied"] == [[[0, "tokens.weight"], [2, "head.weight"]]]
    middle = found["stages"][1]
    assert middle["modules"] == ["blocks.1", "blocks.2"]
    assert middle["sent"] == [
        {
            "name": "blocks_2",
            "to": [2],
            "shape": ["batch", "sequence", "32"],
            "example_shape": [2, 8, 32],
            "dtype": "float32",
            "has_gradient": True,
            "bytes": 2 * 8 * 32 * 4,
        }
    ]


def test_a_model_that_cuts_itself_is_cut_there() -> None:
    assert fxpipe_json("trace", "mlp?stages=3")["num_stages"] == 3


def test_a_model_without_cuts_stays_whole_and_says_how_to_cut_it() -> None:
    assert "ask for more with --stages N" in fxpipe("trace", "gpt?layers=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models/gtp.py:build",), "there is no file models/gtp.py; in models there is gpt.py"),
        (("gpt", "--split", "blocks.9"), "'blocks.9' is not a submodule of GPT"),
        (("gpt", "--split", "norm,norm"), "--split names norm twice"),
        (
            ("gpt", "--split", "blocks.1", "--stages", "3"),
            "--split blocks.1 makes 2 stages, but 3 are needed",
        ),
        (("gpt", "--stages", "500"), "cannot make 500 stages"),
        (("gpt", "--dtype", "int4"), "dtype is one of"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("trace", *arguments)


@pytest.mark.parametrize(
    ("ending", "start"), [("svg", "<"), ("dot", "digraph"), ("md", "```mermaid")]
)
def test_pictures_are_written(tmp_path: Path, ending: str, start: str) -> None:
    path = tmp_path / "new" / f"pipe.{ending}"

    text = fxpipe("draw", "mlp?stages=2", "--out", str(path))

    assert text == f"wrote {path}\n"
    assert path.read_text().lstrip().startswith(start)


def test_pictures_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    model = "mlp?stages=2"

    assert "the name must end with one of" in fails("draw", model, "--out", "pipe.bmp")
    assert "it is a folder; name a file" in fails("draw", model, "--out", str(tmp_path))
    assert "Invalid value for '--depth'" in fails("draw", model, "--depth", "all", code=2)


def test_the_runs_are_listed_with_their_results() -> None:
    found = fxpipe_json("check", "gpt", "--stages", "2", "--quick")

    assert found["equal"] is True
    assert [row["result"] for row in found["runs"]] == ["equal"] * 5
    assert found["runs"][0]["run"] == "the example"
    assert found["runs"][-1]["run"].startswith("a second call")
