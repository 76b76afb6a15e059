"""`fxpipe plan`."""

import time
from pathlib import Path

import pytest

from fxpipe.cli.plan import memory_bytes, token_count
from fxpipe.planner.plan import Plan
from tests.cli.run import fails, fxpipe, fxpipe_json

SMALL = ("gpt", "-p", "2", "--batch-size", "8", "--microbatch-size", "2")


def test_the_best_options_are_listed_with_reasons() -> None:
    text = fxpipe("plan", *SMALL, "--hardware", "cpu core", "--top", "5")

    assert "plan for 2 ranks of" in text
    assert "the cut: rank" in text
    assert "chosen" in text and "slower: " in text


def test_json_has_options_stages_and_files(tmp_path: Path) -> None:
    plan, report = tmp_path / "new" / "plan.json", tmp_path / "plan.html"

    found = fxpipe_json(
        "plan", *SMALL, "--schedule", "1f1b", "--schedule", "zbv", "--data-parallel", "1",
        "--checkpointing", "none", "--improve", "--out", str(plan), "--report", str(report),
    )  # fmt: skip

    assert {row["schedule"] for row in found["options"]} == {"1F1B", "ZBVZeroBubble"}
    assert found["options"][0]["why"] == "chosen"
    assert found["options"][0]["memory"][0]["weights"] > 0
    assert found["stages"][0]["modules"]
    assert found["written"] == [str(plan), str(report)]
    assert Plan.load(plan).num_ranks == 2
    assert "Plan for 2 ranks" in report.read_text()


def test_the_time_from_step_to_step_can_be_wanted() -> None:
    asked = (*SMALL, "--schedule", "ZBH2", "--data-parallel", "1", "--checkpointing", "none")

    alone = fxpipe_json("plan", *asked)["options"][0]
    repeated = fxpipe_json("plan", *asked, "--objective", "period")["options"][0]

    assert repeated["step_time"] < alone["step_time"]
    assert "objective is 'time'; known: step, period" in fails(
        "plan", *asked, "--objective", "time"
    )


def test_hugging_face_configuration_without_weights() -> None:
    found = fxpipe_json(
        "plan", "hf:llama?num_hidden_layers=8", "-p", "8", "--batch-size", "16", "--seq", "512",
        "--dtype", "bfloat16", "--schedule", "1F1B", "--hardware", "a100",
        "--tensor-parallel", "1", "--sharding", "0",
    )  # fmt: skip

    best = found["options"][0]
    assert best["data_parallel"] * best["pipeline"] == 8


def test_parts_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_CACHE", str(tmp_path))

    found = fxpipe_json("plan", *SMALL, "--profile", "--schedule", "1F1B")

    assert found["options"][0]["step_time"] > 0
    assert list(tmp_path.glob("profile-*.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "100kB"), "nothing fits 2 ranks with 100 kB each"),
        (("--memory", "much"), "--memory is an amount such as 40GB, 512MiB or 1e9; got 'much'"),
        (("--hardware", "H1000"), "there is no hardware preset 'H1000'; did you mean H100"),
        (("--hardware", "none.toml"), "cannot read the hardware description 'none.toml'"),
        (("--schedule", "1F2B"), "there is no schedule '1F2B'; did you mean"),
        (
            ("--checkpointing", "some"),
            "checkpointing is ['some']; known: none, expansions, selective, alternate, 1/4",
        ),
        (("--stages-per-rank", "x"), "--stages-per-rank is a number from 1 up"),
        (("--tokens", "many"), "--tokens is an amount such as 15T, 300B or 1e12; got 'many'"),
        (("--kernels", "best"), "unknown kernels 'best'; known: eager"),
        (("--optimizer", "lion"), "unknown optimizer 'lion'"),
        (("--data-parallel", "3"), "data_parallel must divide the 2 ranks"),
        (("--out", "plan.txt"), "this is written as .json, but got plan.txt"),
        (("--what-if-picture", "what.txt"), "this is written as .svg or .png or .pdf, but got"),
        (("--price", "2"), "--price needs --tokens"),
        (("--report", "plan.pdf"), "this is written as .html, but got plan.pdf"),
        (("--offload", "1"), "offload is at least 2 compute actions, or 0 for never, got 1"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("plan", *SMALL, *arguments)


def test_wrong_usage_has_its_own_code() -> None:
    assert "ranks" in fails("plan", "gpt", "-p", "0", code=2)


def test_a_known_model_is_suggested() -> None:
    assert "did you mean llama3-8b" in fails("plan", "llama3-9b", "--gpus", "8")


def test_help_shows_an_example() -> None:
    assert "fxpipe plan gpt" in fxpipe("plan", "--help")


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GB", 40e9), ("512MiB", 512 * 2**20), ("1e9", 1e9), ("1.5 kB", 1500), ("2t", 2e12)],
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "count"), [("15T", 15e12), ("300B", 3e11), ("1e12", 1e12), ("2.5m", 2.5e6)]
)
def test_tokens_are_read(text: str, count: float) -> None:
    assert token_count(text) == count


def test_a_known_model_is_planned_with_its_days_and_dollars() -> None:
    text = fxpipe(
        "plan", "llama3-8b", "--gpus", "64", "--hardware", "H100", "--tokens", "1T", "--price",
        "2.5", "--schedule", "1F1B", "--microbatch-size", "1", "--checkpointing", "selective",
        "--sharding", "3", "--tensor-parallel", "1",
    )  # fmt: skip

    assert "1T tokens take" in text and "at $2.5 per GPU and hour" in text
    assert "of its bfloat16 peak (MFU)" in text
    assert "build() makes pipelines with replicas" in text


def test_what_if_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "what.svg"

    text = fxpipe(
        "plan", *SMALL, "--hardware", "cpu core", "--schedule", "1F1B", "--checkpointing", "none",
        "--what-if-picture", str(picture),
    )  # fmt: skip

    assert "twice the sequence, as many tokens" in text
    # Rows of twice the length looked as if half as much was done.
    drawn = picture.read_text()
    assert "half the ranks" in drawn and "Tokens per second and rank" in drawn


@pytest.mark.full
@pytest.mark.parametrize("gpus", [512, 1024, 8192])
def test_a_model_of_405_billion_parameters_gets_a_plan(gpus: int, tmp_path: Path) -> None:
    out, start = tmp_path / "plan.json", time.process_time()

    text = fxpipe(
        "plan", "llama3-405b", "--gpus", str(gpus), "--hardware", "H100", "--tokens", "15T",
        "--out", str(out),
    )  # fmt: skip

    assert time.process_time() - start < 60
    found = Plan.load(out)
    assert found.best.candidate.num_ranks == gpus
    assert found.best.peak <= found.memory_limit
    assert 0.3 < found.utilization < 0.6
    assert "15T tokens take" in text and "free on each rank" in text


@pytest.mark.full
def test_a_model_with_experts_gets_a_plan_that_keeps_ranks_busy() -> None:
    found = fxpipe_json("plan", "deepseek-v3", "--gpus", "1024", "--hardware", "H100")

    assert found["options"][0]["fits"]
    assert found["utilization"] > 0.2  # it was 0.1
