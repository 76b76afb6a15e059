import pytest

from fxpipe.text import (
    aligned,
    bytes_text,
    count_text,
    flops_text,
    html_table,
    number_text,
    seconds_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (33_280, "33.3 kB"),
        (2048, "2.05 kB"),
        (999_600, "1 MB"),
        (80e9, "80 GB"),
        (-1.5e12, "-1.5 TB"),
        (4e18, "4000 PB"),
    ],
)
def test_bytes_are_decimal_with_three_digits(value, text):
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (3725, "3725 s"),
        (0.9996, "1 s"),
        (0.99, "990 ms"),
        (0.0421, "42.1 ms"),
        (3.2e-6, "3.2 us"),
        (5e-10, "0.5 ns"),
    ],
)
def test_seconds_have_the_unit_that_reads_best(value, text):
    assert seconds_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(950, "950"), (12_400, "12.4 k"), (999_999, "1 M"), (70_553_706_496, "70.6 B"), (0, "0")],
)
def test_count_is_short(value, text):
    assert count_text(value) == text


def test_operations_have_their_own_letters():
    assert flops_text(3.2e9) == "3.2 GFLOPs"
    assert flops_text(4e20) == "400000 PFLOPs"


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5678, "1,235"), (0.00012, "0.00012"), (3.0, "3"), (1e12, "1e+12")]
)
def test_number_has_four_digits(value, text):
    assert number_text(value) == text


def test_columns_are_aligned_and_lines_end_with_a_letter():
    rows = [("name", "size", "note"), ("a", "10", ""), ("longer", "9", "b")]

    assert aligned(rows, left=(0, 2), rule=True) == [
        "name    size  note",
        "------  ----  ----",
        "a         10",
        "longer     9  b",
    ]


def test_html_table_escapes_its_cells():
    assert html_table([("a", "b"), ("<", "2")]) == (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>&lt;</td><td>2</td></tr></tbody></table>"
    )
