from fxpipe.viz.pipe_picture.links import Letters, _letter, give_letters
from tests.viz.pipes import outline_of, shared_outline


def test_nothing_has_a_letter_in_one_column():
    outline = outline_of("unet")

    assert give_letters(outline, dict.fromkeys(range(4), 0)) == Letters()


def test_what_changes_column_has_a_letter():
    outline = outline_of("encoder_decoder")

    letters = give_letters(outline, {0: 0, 1: 0, 2: 1, 3: 1})

    assert letters.lines == (
        "A   source_mask[:, None, None, :]  bool[batch, 1, 1, sequence] · 16 B, "
        "from stage 0 to stages 2–3",
        "B   encoder.norm  float32[batch, sequence, 32] · 2.05 kB, from stage 1 to stage 3",
    )
    assert letters.sends == {0: ("sends A",), 1: ("sends B",)}
    assert letters.reads == {2: ("reads A",), 3: ("reads A, B",)}
    assert len(letters.crossings) == 3


def test_ties_between_columns_have_a_letter():
    letters = give_letters(outline_of("gpt"), {0: 0, 1: 0, 2: 1, 3: 1})

    assert letters.lines == ("A   tied: tokens.weight (stage 0) = head.weight (stage 3)",)
    assert letters.sends == {0: ("tied A",), 3: ("tied A",)}
    assert len(letters.ties) == 1


def test_shared_values_have_a_letter_in_any_case():
    letters = give_letters(shared_outline(), dict.fromkeys(range(8), 0))

    assert [line[0] for line in letters.lines] == ["A", "B"]
    assert letters.reads[5] == ("reads A, B",)


def test_letters_go_on_after_z():
    assert [_letter(i) for i in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
