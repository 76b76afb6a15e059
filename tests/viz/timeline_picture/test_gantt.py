from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from fxpipe.program import Kind, Timeline
from fxpipe.program.generators import SCHEDULES
from fxpipe.viz.palette import LOOKS, ON_COLOUR, shade
from fxpipe.viz.scene import Area, Box, Label, Line, label_extent
from fxpipe.viz.timeline_picture.gantt import lay_out_timeline
from fxpipe.viz.timeline_picture.spans import Words
from tests.viz.timelines import lowered_timeline, sharded_timeline, timeline_of


def wordy_scene():
    words = Words("a very long title, " * 20, "widgets per fortnight", "heaps of memory")
    timeline = timeline_of("Interleaved1F1B")
    return lay_out_timeline(timeline, words, measured=timeline)


SCENES = {
    name: partial(lambda name: lay_out_timeline(timeline_of(name), Words(title=name)), name)
    for name in SCHEDULES
}
SCENES |= {
    "lowered": lambda: lay_out_timeline(lowered_timeline("ZBVZeroBubble"), Words()),
    "sharded": lambda: lay_out_timeline(sharded_timeline(), Words()),
    "64 ranks": lambda: lay_out_timeline(timeline_of("1F1B", 64, 96), Words()),
    "wordy": wordy_scene,
}


@pytest.fixture(params=SCENES)
def scene(request):
    return SCENES[request.param]()


def test_everything_is_on_the_sheet(scene):
    for item in scene.items:
        if isinstance(item, Box):
            left, top, right, bottom = item.x, item.y, item.x + item.width, item.y + item.height
        elif isinstance(item, Label):
            left, top, right, bottom = label_extent(item)
        else:
            xs, ys = zip(*item.points, strict=True)
            left, top, right, bottom = min(xs), min(ys), max(xs), max(ys)
        assert left >= -0.01 and top >= -0.01, item
        assert right <= scene.width + 0.01 and bottom <= scene.height + 0.01, item


def test_labels_do_not_overlap_each_other(scene):
    places = [label_extent(item) for item in scene.items if isinstance(item, Label)]
    places.sort()
    for index, (left, top, right, bottom) in enumerate(places):
        for other_left, other_top, _, other_bottom in places[index + 1 :]:
            if other_left >= right - 0.01:
                break
            apart = other_top >= bottom - 0.01 or other_bottom <= top + 0.01
            assert apart, ((left, top, right, bottom), (other_left, other_top))


def test_labels_stay_in_their_boxes(scene):
    kinds = {shade(kind, i, n) for kind in Kind for n in (1, 2) for i in range(n)}
    boxes = [item for item in scene.items if isinstance(item, Box) and item.fill in kinds]
    labels = [item for item in scene.items if isinstance(item, Label) and item.anchor == "middle"]
    for label in labels:
        left, top, right, bottom = label_extent(label)
        for box in boxes:
            if box.y <= label.y <= box.y + box.height and box.x <= label.x <= box.x + box.width:
                assert left >= box.x - 0.01 and right <= box.x + box.width + 0.01
                assert top >= box.y - 1 and bottom <= box.y + box.height + 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_a_box_of_its_length_with_letter_and_number(name):
    timeline = timeline_of(name)
    scene = lay_out_timeline(timeline, Words())
    tips = [item for item in scene.items if isinstance(item, Box) and item.tip]
    per_time = (tips[-1].width + 0.8) / (timeline.spans[-1].end - timeline.spans[-1].start)
    parts = [part for span in timeline.spans for part in span.action.parts or (span.action,)]

    assert len(tips) == len(parts)
    assert per_time > 0
    labels = {item.text for item in scene.items if isinstance(item, Label)}
    for part in parts:
        assert f"{LOOKS[part.kind].letter}{part.microbatch}" in labels


def test_boxes_of_a_rank_do_not_overlap():
    scene = lay_out_timeline(timeline_of("ZBVZeroBubble"), Words())
    rows = {}
    for item in scene.items:
        if isinstance(item, Box) and item.tip:
            rows.setdefault(item.y, []).append((item.x, item.x + item.width))

    assert len(rows) == 4
    for boxes in rows.values():
        boxes.sort()
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(boxes))


def test_transfers_are_arrows_below_their_rank():
    timeline = lowered_timeline("1F1B")

    scene = lay_out_timeline(timeline, Words())

    arrows = [item for item in scene.items if isinstance(item, Area) and item.tip]
    assert len(arrows) == sum(span.action.kind.is_transfer for span in timeline.spans)
    assert all(len(item.points) == 5 for item in arrows)


def test_activations_and_gradients_point_different_ways():
    scene = lay_out_timeline(lowered_timeline("1F1B"), Words())
    arrows = [item for item in scene.items if isinstance(item, Area) and item.tip]

    for arrow in arrows:
        tip_x = arrow.points[2][0]
        is_activation = "activation" in arrow.tip
        assert tip_x == (max if is_activation else min)(x for x, _ in arrow.points)


def test_measured_rows_stand_below_the_simulated_ones():
    simulated, measured = timeline_of("1F1B"), timeline_of("GPipe")

    scene = lay_out_timeline(simulated, Words(), measured=measured)

    names = [
        item.text
        for item in scene.items
        if isinstance(item, Label) and item.text in ("measured", "rank 0", "rank 1")
    ]
    assert names[:4] == ["rank 0", "measured", "rank 1", "measured"]
    dashed = [item for item in scene.items if isinstance(item, Line) and item.dash]
    assert len(dashed) == 4


def test_memory_curves_share_a_scale():
    timeline = timeline_of("1F1B")
    scene = lay_out_timeline(timeline, Words())

    curves = [item for item in scene.items if isinstance(item, Area) and not item.tip]
    heights = [max(y for _, y in c.points) - min(y for _, y in c.points) for c in curves]

    assert [height / heights[0] * 4 for height in heights] == pytest.approx([4, 3, 2, 1])
    labels = [item.text for item in scene.items if isinstance(item, Label)]
    assert [text for text in labels if text.startswith("peak ")][-4:] == [
        "peak 4",
        "peak 3",
        "peak 2",
        "peak 1",
    ]


def test_timeline_without_spans_is_a_picture():
    scene = lay_out_timeline(Timeline(2, (), ((), ()), ()), Words())

    assert scene.width > 0


@pytest.mark.parametrize(
    ("ranks", "microbatches", "labelled"), [(4, 8, 64), (8, 16, 256), (16, 32, 0)]
)
def test_all_boxes_have_labels_or_none_has(ranks, microbatches, labelled):
    # In a picture of 16 ranks backwards had labels and the narrower forwards had none.
    scene = lay_out_timeline(timeline_of("1F1B", ranks, microbatches), Words())

    labels = [i for i in scene.items if isinstance(i, Label) and i.anchor == "middle"]
    assert len([i for i in labels if i.fill == ON_COLOUR]) == labelled


def test_memory_that_was_not_measured_is_not_drawn():
    # A measured timeline has no curves, and its picture said "peak 0".
    simulated = timeline_of("1F1B")
    measured = replace(simulated, memory=((),) * simulated.num_ranks)

    assert measured.peak_memory == ()
    assert not any("memory" in text or "peak" in text for text in texts(measured))
    assert sum("peak" in text for text in texts(simulated)) > simulated.num_ranks


def texts(timeline):
    scene = lay_out_timeline(timeline, Words())
    return [item.text for item in scene.items if isinstance(item, Label)]
