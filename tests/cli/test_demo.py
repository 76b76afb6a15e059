"""`fxpipe demo`: the whole way through torchrun, with few steps."""

from pathlib import Path

import pytest

from fxpipe.cli import train
from fxpipe.errors import FxpipeError
from tests.cli.run import fxpipe

PICTURES = ("gpt.svg", "timeline.svg", "report.html")


def test_trains_beside_the_plain_model_and_draws(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    folder = Path("pictures")

    fxpipe("demo", "--steps", "3", "--out", str(folder))

    text = capfd.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith("step ")]
    assert [row[1] for row in rows] == ["0", "1", "2"]
    for row in rows:
        assert float(row[3]) == pytest.approx(float(row[5]), abs=1e-8)
        assert float(row[-1]) < 1e-8
    assert "blocks.0 … blocks.1 (2 × Block)" in text
    assert "rank 1 |" in text
    for name in PICTURES:
        assert str(folder / name) in text.partition("wrote")[2]
        assert (folder / name).stat().st_size > 1000


def test_other_gradients_are_a_failure() -> None:
    with pytest.raises(FxpipeError, match=r"differ from the plain model's by 2\.0e-03"):
        train.check_difference(2e-3)
    with pytest.raises(FxpipeError, match=r"differ from the plain model's by nan"):
        train.check_difference(float("nan"))
    train.check_difference(1e-10)


def test_the_model_is_given_numbers_in_order() -> None:
    rows, target = train.counting(3, seed=1), train.counting_target(3, seed=1)

    assert ((rows[:, 1:] - rows[:, :-1]) % 64 == 1).all()
    assert (target[:, :-1] == rows[:, 1:]).all()
