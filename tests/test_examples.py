"""Every script of examples/ runs on its ranks; a killed run goes on as if it had not been."""

from pathlib import Path

import pytest

from tests.torchrun import ROOT, on_ranks, torchrun

EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}
pytestmark = pytest.mark.timeout(900)  # two runs of torchrun on a busy machine


def run(folder: Path, ranks: int, script: str, *args: str, restarts: int = 0) -> str:
    return torchrun(folder, ranks, ROOT / "examples" / script, *args, restarts=restarts)


def losses(path: Path) -> dict[int, str]:
    """The last loss of each step; a step that was made again overwrites the first."""
    return {int(number): loss for number, loss in map(str.split, path.read_text().splitlines())}


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    # All ranks are killed before step 5, one step after the last save, while it may be written.
    common = ("--steps", "7", "--save-every", "2")
    for name, crash in (("whole", "-1"), ("killed", "5")):
        run(
            tmp_path,
            2,
            "train_gpt.py",
            *common,
            *("--folder", name, "--losses", f"{name}.txt", "--crash-at", crash),
            restarts=1,
        )

    assert losses(tmp_path / "killed.txt") == losses(tmp_path / "whole.txt")
    assert (tmp_path / "killed.txt").read_text() != (tmp_path / "whole.txt").read_text()


@pytest.mark.full
def test_a_killed_run_goes_on_with_other_stages(tmp_path: Path) -> None:
    first = ("--save-every", "2", "--folder", "run", "--losses", "run.txt")
    run(tmp_path, 2, "train_gpt.py", "--steps", "4", *first)
    run(tmp_path, 4, "train_gpt.py", "--steps", "8", "--schedule", "ZBVZeroBubble", *first)
    found = losses(tmp_path / "run.txt")

    assert set(found) == set(range(1, 9))
    assert float.fromhex(found[8]) < float.fromhex(found[1])


def test_train_hf_goes_on_exports_and_generates(tmp_path: Path) -> None:
    example = ROOT / "examples" / "train_hf.py"
    said = on_ranks(tmp_path, 2, example, "--steps", "2")
    assert "the exported model generates the same: True" in said
    said = on_ranks(tmp_path, 4, example, "--steps", "3")
    assert said.count("loss on other text") == 4
    assert "the exported model generates the same: True" in said


OTHERS = [
    (2, "finetune_lora.py", ("--steps", "3", "--schedule", "ZBVZeroBubble")),
    (4, "pp_dp_fsdp.py", ("--steps", "3", "--data-parallel", "fsdp")),
    (4, "pp_tp.py", ()),
]


@pytest.mark.parametrize(("ranks", "script", "args"), OTHERS, ids=lambda value: str(value)[:20])
def test_other_examples_run(ranks: int, script: str, args: tuple[str, ...], tmp_path: Path) -> None:
    assert "loss" in on_ranks(tmp_path, ranks, ROOT / "examples" / script, *args)


def test_every_example_is_run_here() -> None:
    named = {script for _, script, _ in OTHERS} | {"train_gpt.py", "train_hf.py"}

    assert named == EXAMPLES
