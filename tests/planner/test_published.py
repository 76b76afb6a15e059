"""Published rows: what is predicted of them, and that it stays as good as the docs say."""

import statistics
from pathlib import Path

import pytest

from benchmarks.published.__main__ import predict_all, ranking, report, write_docs
from benchmarks.published.rows import Predictor, read_rows

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


@pytest.mark.full
@pytest.mark.parametrize("source", sorted({row.source for row in ROWS}))
def test_rows_are_predicted(source, tmp_path):
    results = predict_all([row for row in ROWS if row.source == source], Predictor())

    lines = report(results)
    Path(tmp_path / f"{source}.txt").write_text("\n".join(lines))
    errors = [abs(result.error) for result in results if result.row.is_test]
    right, pairs = ranking(results)
    assert statistics.median(errors) < 0.3
    memory = [result.memory_error for result in results if result.memory_error is not None]
    assert min(memory, default=0) >= -0.03
    assert right >= 0.8 * pairs
