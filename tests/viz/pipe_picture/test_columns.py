from dataclasses import astuple
from itertools import combinations

import pytest

from fxpipe.viz.palette import LIGHT
from fxpipe.viz.pipe_picture.columns import lay_out_pipe
from fxpipe.viz.scene import Box, Label, Line, label_extent
from fxpipe.viz.svg import write_svg
from tests.viz.pipes import long_outline, outline_of, shared_outline

CASES = [
    *(
        (name, depth, 4)
        for name in ("gpt", "unet", "encoder_decoder")
        for depth in ("stages", "blocks", "nodes")
    ),
    ("gpt", "blocks", 2),
    ("gpt", "stages", 16),
    ("gpt", "blocks", 16),
    ("gpt", "stages", 64),
    ("shared", "stages", 8),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def scene(request):
    name, depth, num_stages = request.param
    if name == "shared":
        return lay_out_pipe(shared_outline(num_stages), title=name)
    is_long = num_stages > 8
    outline = long_outline(depth, num_stages) if is_long else outline_of(name, depth, num_stages)
    return lay_out_pipe(outline, title=f"{name}, {num_stages} stages")


def stage_boxes(scene):
    """The boxes of stages, which nothing else is as round as."""
    return [item for item in scene.items if isinstance(item, Box) and item.radius == 7]


def test_everything_is_on_the_sheet(scene):
    for item in scene.items:
        if isinstance(item, Label):
            left, top, right, bottom = label_extent(item)
        elif isinstance(item, Box):
            left, top, right, bottom = item.x, item.y, item.x + item.width, item.y + item.height
        else:
            xs, ys = zip(*item.points, strict=True)
            left, top, right, bottom = min(xs), min(ys), max(xs), max(ys)
        assert min(left, top) >= 0, item
        assert right <= scene.width and bottom <= scene.height, item


def test_stages_do_not_overlap(scene):
    for a, b in combinations(stage_boxes(scene), 2):
        assert (
            a.x + a.width < b.x
            or b.x + b.width < a.x
            or a.y + a.height < b.y
            or b.y + b.height < a.y
        )


def test_labels_do_not_overlap(scene):
    labels = sorted((label_extent(item), item) for item in scene.items if isinstance(item, Label))
    for index, ((_, top, right, bottom), label) in enumerate(labels):
        for (left, other_top, _, other_bottom), other in labels[index + 1 :]:
            if left >= right:
                break
            assert other_top >= bottom - 0.5 or top >= other_bottom - 0.5, (label, other)


def test_text_in_a_stage_stays_in_it(scene):
    boxes = stage_boxes(scene)
    for label in (item for item in scene.items if isinstance(item, Label)):
        for box in boxes:
            inside = box.x < label.x < box.x + box.width and box.y < label.y < box.y + box.height
            if inside:
                left, top, right, bottom = label_extent(label)
                assert box.x <= left and right <= box.x + box.width
                assert box.y <= top and bottom <= box.y + box.height


def crosses(line, extent):
    """Whether a line of level and upright pieces runs through a rectangle."""
    left, top, right, bottom = extent
    for (x0, y0), (x1, y1) in zip(line.points, line.points[1:], strict=False):
        if (
            min(x0, x1) < right - 0.5
            and max(x0, x1) > left + 0.5
            and min(y0, y1) < bottom - 0.5
            and max(y0, y1) > top + 0.5
        ):
            return True
    return False


def test_no_line_runs_through_text_outside_of_stages(scene):
    boxes = stage_boxes(scene)
    labels = [
        label
        for label in scene.items
        if isinstance(label, Label)
        and not any(
            b.x <= label.x <= b.x + b.width and b.y <= label.y <= b.y + b.height for b in boxes
        )
    ]
    lines = [item for item in scene.items if isinstance(item, Line)]

    assert labels
    for label in labels:
        for line in lines:
            assert not crosses(line, label_extent(label)), (label, line)


def test_sixty_four_stages_make_a_page():
    scene = lay_out_pipe(long_outline("stages", 64), title="GPT")

    assert 1 < scene.width / scene.height < 2.5
    assert len(stage_boxes(scene)) == 64
    assert len(write_svg(scene)) < 300_000
    smallest = min(item.size for item in scene.items if isinstance(item, Label))
    assert smallest >= 9


def test_skips_and_ties_look_different_from_chains():
    skips = [i for i in lay_out_pipe(outline_of("unet")).items if isinstance(i, Line)]
    ties = [i for i in lay_out_pipe(outline_of("gpt")).items if isinstance(i, Line)]

    assert {(i.dash, i.arrow) for i in skips if i.stroke == LIGHT.skip and i.arrow} == {
        ("5 3", True)
    }
    assert ("1.5 2.5", False) in {(i.dash, i.arrow) for i in ties if i.stroke == LIGHT.tied}
    assert {i.dash for i in ties if i.stroke == LIGHT.muted} == {""}


def test_heaviest_stage_has_the_longest_bar():
    scene = lay_out_pipe(outline_of("unet"))
    bars = [i.width for i in scene.items if isinstance(i, Box) and i.fill == LIGHT.bar]
    shares = [stage.share for stage in outline_of("unet").stages]

    assert [bar / max(bars) for bar in bars] == pytest.approx([s / max(shares) for s in shares])


def test_every_colour_has_one_for_dark_mode():
    scene = lay_out_pipe(outline_of("gpt"))

    used = {getattr(item, name, "") for item in scene.items for name in ("fill", "stroke")}
    assert used <= {"", *astuple(LIGHT)}


def test_skip_past_the_first_module_of_the_next_stage_ends_at_its_module():
    # down.2 gives two values to the next stage: one for `middle`, one for `up.0` below it,
    # which used to end at the border of the stage.
    outline = outline_of("unet")

    scene = lay_out_pipe(outline)

    skips = [i for i in scene.items if isinstance(i, Line) and i.stroke == LIGHT.skip and i.arrow]
    titles = {i.text for i in scene.items if isinstance(i, Label) and i.fill == LIGHT.skip}
    assert len(skips) == 3
    assert {"down.0[1]", "down.1[1]", "down.2[1]"} <= titles
    assert {line.points[-1][0] for line in skips} == {line.points[0][0] for line in skips}
