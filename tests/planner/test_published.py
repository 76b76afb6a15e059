"""Published rows: what is predicted of them, and that it stays as good as the docs say."""

import re
import statistics
from pathlib import Path

import pytest

from benchmarks.published.__main__ import predict_all, ranking, report, write_docs
from benchmarks.published.rows import Predictor, read_rows
from fxpipe.planner.cost.presets import HARDWARE

ROWS = read_rows()


def test_models_and_sources_are_held_out_as_a_whole():
    fitted = {(row.source, row.model.split("+")[0]) for row in ROWS if not row.is_test}
    held_out = {(row.source, row.model.split("+")[0]) for row in ROWS if row.is_test}

    assert fitted.isdisjoint(held_out)
    assert sum(row.is_test for row in ROWS) > len(ROWS) / 2


def test_zero_bubble_2p_is_quicker_than_interleaved_and_holds_2p_microbatches():
    # ZBH2 stood for it: 2 of 11 options were in the wrong order, and 7 % of the memory was missing.
    named = {
        row.candidate.schedule: row
        for row in ROWS
        if row.source == "zero-bubble" and row.is_test and row.candidate.num_microbatches == 24
    }
    results = predict_all([named["Interleaved1F1B"], named["ZBH2"]], Predictor())

    assert results[1].option.step_time < 0.97 * results[0].option.step_time
    assert -0.03 < results[1].memory_error < 0.08


def test_reserved_memory_of_405b_is_not_predicted_too_low():
    # Goal: never more than 3 % low. It was 10 %: a stage's gradients are made anew between
    # temporaries, weights arrive in another stream, torch has a buffer for each gradient to come.
    row = max((r for r in ROWS if r.memory and "405b" in r.model and r.sequence == 8192),
              key=lambda r: r.memory)  # fmt: skip

    (result,) = predict_all([row], Predictor())

    assert -0.03 <= result.memory_error < 0.08


def test_the_table_is_put_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- published: begin -->\nold\n<!-- published: end -->\nb\n")

    write_docs(["row"], page)

    assert page.read_text() == (
        "a\n<!-- published: begin -->\n```text\nrow\n```\n<!-- published: end -->\nb\n"
    )


def test_the_error_that_a_plan_claims_is_that_of_its_device_in_the_docs():
    # A GB200 claimed 8 %, where its own rows are off by 11 % at the median, and Hopper 6 for 7 %.
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    found = re.findall(r"^\S+ ([A-Z]+\d+)\S* +(.+) test +.*?([+-][\d.]+)%", page, re.MULTILINE)
    dense = [(device, abs(float(error))) for device, how, error in found if " EP" not in how]

    def median(*devices):
        return statistics.median(error for device, error in dense if device in devices)

    assert round(median("A100")) == round(100 * HARDWARE["A100"].error)
    for name in ("H100", "H200"):
        assert round(median("H100", "H200")) == round(100 * HARDWARE[name].error)
    assert round(median("GB200")) == round(100 * HARDWARE["GB200"].error)
    assert round(median("B200", "GB200")) == round(100 * HARDWARE["B200"].error)  # 2 of its own
    for name in ("V100", "MI300X", "L40S", "RTX4090"):
        assert name not in {device for device, _ in dense} and HARDWARE[name].error == 0


@pytest.mark.full
def test_the_goals_are_met_on_rows_that_nothing_was_fitted_to():
    results = predict_all(ROWS, Predictor())

    held_out = [result for result in results if result.row.is_test]
    errors = [abs(result.error) for result in held_out]
    assert statistics.median(errors) <= 0.06
    assert sum(error <= 0.15 for error in errors) >= 0.9 * len(errors)
    right, pairs = ranking(held_out)
    assert right >= 0.95 * pairs > 0
    memory = [result.memory_error for result in held_out if result.memory_error is not None]
    assert min(memory) >= -0.03
    assert statistics.median(map(abs, memory)) <= 0.08
    # What the docs sum up is what comes out today.
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    assert [line for line in report(results) if "held out" in line and line not in page] == []
