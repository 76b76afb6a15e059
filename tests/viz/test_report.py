import json
import re
from html.parser import HTMLParser

import pytest

from fxpipe.errors import FxpipeError
from fxpipe.program import Kind
from fxpipe.viz.report import report_html, write_report
from tests.viz.pipes import pipe_of
from tests.viz.reports import candidates, full_report

VOID = {"meta", "link", "br", "input"}


class Page(HTMLParser):
    """Collects elements and texts, and checks that elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.elements = []
        self.texts = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_page_is_well_formed_and_names_its_parts():
    page = Page(full_report())

    assert page.texts["h1"] == "GPT </script> & 4 ranks"
    assert page.texts["h2"] == "TimelineSchedulesStagesStage graph"
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.elements:
        for reference in ("aria-labelledby", "aria-describedby"):
            assert attrs.get(reference, ids[0]) in ids


def test_page_needs_no_network():
    page = Page(full_report())

    for tag, attrs in page.elements:
        for name in ("src", "href"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
    assert "@import" not in full_report()
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\s*\(", full_report())
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_text_cannot_end_the_data():
    text = full_report()

    assert text.count("</script>") == 2
    assert text.count("<note>") == 0


def test_data_has_every_span_with_what_it_waits_for():
    data = data_of(full_report())

    assert data["chosen"] == 3
    assert [kind["text"] for kind in data["kinds"]] == [kind.text for kind in Kind]
    for raw, (name, program, timeline) in zip(data["schedules"], candidates(), strict=True):
        assert (raw["name"], raw["microbatches"]) == (name, program.num_microbatches)
        columns = ("rank", "kind", "stage", "microbatch", "peer", "start", "end", "lane", "waits")
        assert {len(raw[column]) for column in columns} == {len(timeline.spans)}
        assert raw["makespan"] == pytest.approx(timeline.makespan)
        assert len(raw["critical"]) == len(timeline.critical_path)
        assert len(raw["tones"]) == program.num_stages
        for index, waits in enumerate(raw["waits"]):
            assert all(raw["end"][w] <= raw["end"][index] + 1e-4 for w in waits)
        lanes = [lane for lane, kind in zip(raw["lane"], raw["kind"], strict=True) if kind < 4]
        assert set(lanes) == {-1}


def test_pairs_have_their_parts():
    data = data_of(full_report())
    dual = next(
        raw for raw in data["schedules"] if (raw["name"], raw["microbatches"]) == ("DualPipeV", 8)
    )

    assert dual["parts"]
    for index, parts in dual["parts"].items():
        assert dual["kind"][int(index)] == Kind.OVERLAP
        assert len(parts) == 2


def test_tables_have_a_row_for_each():
    text = full_report()

    assert len(re.findall(r'<tr data-schedule="\d+">', text)) == len(candidates())
    assert re.findall(r'data-stage-rank="(\d)">(\d)<', text) == [(str(s), str(s)) for s in range(4)]
    for expected in ("1 GFLOPs", "12.7 k", "1.05 MB", "37.5%", "blocks.3, norm, head"):
        assert expected in text


def test_edges_of_the_pipe_are_dependencies():
    program_of = candidates()[2]
    text = report_html([program_of], pipe=pipe_of("unet"))
    (raw,) = data_of(text)["schedules"]
    forward = next(
        i
        for i, (kind, stage) in enumerate(zip(raw["kind"], raw["stage"], strict=True))
        if (kind, stage) == (Kind.FORWARD, 3)
    )

    assert sorted(raw["stage"][w] for w in raw["waits"][forward]) == [0, 1, 2]


def test_report_without_a_pipe_has_schedules_alone():
    page = Page(report_html(candidates()[:1]))

    assert page.texts["h2"] == "TimelineSchedules"


def test_report_is_an_html_file(tmp_path):
    path = write_report(tmp_path / "plan.html", candidates()[:1], title="plan")

    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(FxpipeError, match=r"'plan\.pdf' does not end with \.html"):
        write_report(tmp_path / "plan.pdf", candidates()[:1])


def test_nothing_to_show_is_refused():
    with pytest.raises(FxpipeError, match="at least one schedule to show, got none"):
        report_html([])
    with pytest.raises(FxpipeError, match="one of the 1 candidates from 0, got 1"):
        report_html(candidates()[:1], chosen=1)
