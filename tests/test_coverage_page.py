"""The tables of docs/coverage.md are written by the benchmarks that measure them."""

from pathlib import Path

import pytest

from benchmarks import hf_coverage, zoo
from benchmarks.coverage import FAIL, SIZES, UNCUT, WHOLE, Collection, classified, put_table

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
OK = {"eager": "ok", "trace": "ok", "train": "ok"}
REFUSED = {**OK, "length": "PipeliningShapeError at a.py:1: only 8, as traced"}
ROWS = {
    "whole": {"2": OK},
    "sized": {"2": REFUSED},
    "uncut": {"2": {"eager": "ok", "trace": "skip: no blocks"}},
    "wrong": {"2": {**OK, "train": "AssertionError at b.py:2: differs"}},
    "broken": {"2": {"eager": "TypeError at c.py:3: no"}},
}


def test_models_are_sorted_by_how_far_they_get():
    runs = {name: row["2"] for name, row in ROWS.items() if name != "broken"}

    assert classified(runs) == {
        WHOLE: ["whole"], SIZES: ["sized"], UNCUT: ["uncut"], FAIL: ["wrong"],
    }  # fmt: skip


def test_a_table_replaces_the_one_before(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmarks.zoo -->\nold\n<!-- end -->\nafter\n")
    collection = Collection("benchmarks.zoo", list, lambda name, variant: None, ("sympy",))

    put_table(page, collection, ROWS, [2])

    text = page.read_text()
    assert text.startswith("before\n<!-- benchmarks.zoo -->\nOne run of `python -m benchmarks.zoo`")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "| the plain model runs | 4 |" in text
    assert "| sized | 2 | length | only 8, as traced |" in text
    assert "| wrong | 2 | train | differs |" in text


@pytest.mark.parametrize("benchmark", [hf_coverage, zoo])
def test_the_page_has_a_place_for_each_table(benchmark):
    assert f"<!-- {benchmark.__name__} -->" in PAGE.read_text()
