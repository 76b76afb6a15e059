from dataclasses import astuple
from itertools import combinations

from fxpipe.program import Kind
from fxpipe.viz.palette import DARK, LIGHT, LOOKS, ON_COLOUR, lighten, shade, shades
from tests.viz.timelines import timeline_of


def seen(colour, deficiency):
    """A colour as linear light, as people with a colour deficiency see it (Viénot 1999)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = red**2.2, green**2.2, blue**2.2
    if deficiency == "protan":
        red, green = (0.11238 * red + 0.88762 * green,) * 2
    if deficiency == "deutan":
        red, green = (0.29275 * red + 0.70725 * green,) * 2
    return red, green, blue


def luminance(colour):
    red, green, blue = seen(colour, "")
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_kind_has_a_look():
    assert set(LOOKS) == set(Kind)


def test_compute_kinds_differ_without_colour():
    kinds = [kind for kind in Kind if kind.is_compute]

    assert len({LOOKS[kind].letter for kind in kinds}) == len(kinds)
    assert len({LOOKS[kind].hatch for kind in kinds}) == len(kinds)


def test_compute_kinds_differ_for_every_colour_vision():
    kinds = [kind for kind in Kind if kind.is_compute]

    for deficiency in ("", "protan", "deutan"):
        for first, second in combinations(kinds, 2):
            a, b = (seen(shade(kind, 0, 1), deficiency) for kind in (first, second))
            assert sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 0.15, (
                deficiency,
                first,
                second,
            )


def test_labels_can_be_read_on_every_shade():
    ink = luminance(ON_COLOUR)
    for kind in Kind:
        for index in range(4):
            contrast = (luminance(shade(kind, index, 4)) + 0.05) / (ink + 0.05)
            assert contrast >= 4.0, (kind, index, contrast)


def test_later_stages_of_a_rank_are_darker():
    tones = [luminance(shade(Kind.FORWARD, index, 4)) for index in range(4)]

    assert tones == sorted(tones, reverse=True)
    assert len(set(tones)) == 4


def test_shades_count_the_stages_of_each_rank():
    found = shades(timeline_of("Interleaved1F1B").spans)

    assert found == {stage: (stage // 4, 2) for stage in range(8)}


def test_colours_are_lightened_up_to_white():
    assert lighten("#004080", 0) == "#004080"
    assert lighten("#004080", 0.5) == "#80a0c0"
    assert lighten("#004080", 1) == "#ffffff"


def test_themes_can_be_read_and_told_apart():
    for theme in (LIGHT, DARK):
        lights = sorted(map(luminance, (theme.paper, theme.ink)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) > 12
    # A colour is replaced by its name in an attribute: one that stood twice would be ambiguous.
    assert len({*astuple(LIGHT), ON_COLOUR}) == len(astuple(LIGHT)) + 1
