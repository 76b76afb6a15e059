import pytest

from fxpipe.viz.scene import Label, Line, arrow_head, fit_text, label_extent, text_width


def test_wide_letters_take_more_room():
    assert text_width("WWW", 10) > text_width("iii", 10)
    assert text_width("abc", 20) == 2 * text_width("abc", 10)
    assert text_width("abc", 10, bold=True) > text_width("abc", 10)


@pytest.mark.parametrize("width", [0, 5, 20, 40, 80, 200])
def test_fitted_text_fits(width):
    text = "model.layers.17.self_attention.out"

    fitted = fit_text(text, 11, width)

    assert text_width(fitted, 11) <= width
    assert fitted == text or "…" in fitted or fitted == ""


def test_text_loses_its_middle():
    fitted = fit_text("model.layers.17.self_attention.out", 11, 120)

    assert fitted.startswith("model.")
    assert fitted.endswith(".out")


@pytest.mark.parametrize(("anchor", "left"), [("start", 50), ("middle", 45), ("end", 40)])
def test_extent_follows_the_anchor(anchor, left):
    size = 10 / text_width("x", 1)

    found = label_extent(Label(50, 20, "x", size, "#000000", anchor))

    assert found[0] == pytest.approx(left)
    assert found[2] == pytest.approx(left + 10)
    assert found[1] < 20 < found[3]


def test_arrow_head_points_along_the_last_piece():
    tip, left, right = arrow_head(Line(((0, 0), (0, 10), (20, 10)), "#000000", arrow=True))

    assert tip == (20, 10)
    assert left[0] == right[0] < 20
    assert left[1] > 10 > right[1]
