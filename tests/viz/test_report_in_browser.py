"""The report in a real browser: what people do with it, and nothing in the console."""

import pytest

from tests.viz.browser import View, open_browser
from tests.viz.reports import candidates, full_report


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(full_report(), encoding="utf-8")
    return path


@pytest.fixture
def open_view(browser, file):
    """Open the report; the test fails if the page complains."""
    views = []

    def opened(**options):
        views.append(View(browser, file, **options))
        return views[-1]

    yield opened
    for view in views:
        assert view.problems == []
        view.page.close()


@pytest.fixture
def page(open_view):
    return open_view()


def place_of(page, index):
    """Scroll the chart into view; where the middle of an action is on the screen."""
    page.middle_of("#chart")
    return page.run(
        f"(() => {{ const i = {index}; const b = element('chart').getBoundingClientRect();"
        "const p = chart.place(i);"
        "const x = (chart.x(chart.schedule.start[i]) + chart.x(chart.schedule.end[i])) / 2;"
        "return [b.x + x, b.y + p.top + p.height / 2]; })()"
    )


def choose(view, selector, value):
    view.page.select_option(selector, value)
    view.settle()


def details(page):
    return page.run("element('details').innerText")


def test_loads_from_a_file_alone(page):
    assert page.run("document.title") == "GPT </script> & 4 ranks"
    assert page.run("chart.schedule.name") == "1F1B"
    assert "8 microbatches · makespan 33 ms · idle 27.3%" in page.run(
        "element('figures').innerText"
    )
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}


def test_chart_is_painted(page):
    colours = page.run(
        "(() => { const c = element('chart'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        "for (let i = 0; i < d.length; i += 4) s.add(d[i] + ',' + d[i+1] + ',' + d[i+2]);"
        "return [...s]; })()"
    )

    forward = page.run("chart.schedule.colourOf(0, 0).slice(4, -1)")
    backward = page.run("chart.schedule.colourOf(1, 0).slice(4, -1)")
    assert forward in colours
    assert backward in colours


def test_hover_tells_action_start_duration_and_dependencies(page):
    index = page.run(
        "chart.schedule.rows[1].compute.find(i => chart.schedule.actionText(i) === '1B0')"
    )

    page.move(*place_of(page, index))

    assert page.run("element('tip').innerText").splitlines() == [
        "1B0",
        "backward, stage 1, microbatch 0",
        "rank 1, starts at 8 ms, takes 2 ms",
        "waits for 2B0 on rank 2, 1F0 on rank 1",
    ]
    page.move(5, 5)
    assert page.run("element('tip').hidden")


def test_click_shows_details_and_leads_on(page):
    index = page.run("chart.schedule.rows[3].compute[0]")

    page.click(*place_of(page, index))
    assert details(page).startswith("3F0")
    page.click(*page.middle_of("#details button"))

    assert details(page).startswith("2F0")
    assert page.run("document.activeElement.id") == "chart"


def test_schedule_and_microbatches_can_be_chosen(page):
    choose(page, "#schedule", "ZBVZeroBubble")
    assert page.run("[chart.schedule.name, chart.schedule.microbatches]") == ["ZBVZeroBubble", 8]
    assert "W backward, weight half" in page.run("element('legend').innerText")

    options = page.run("[...element('microbatches').options].map(o => o.text)")
    assert options == ["4", "8"]
    choose(page, "#microbatches", page.run("element('microbatches').options[0].value"))
    assert page.run("chart.schedule.microbatches") == 4
    ranks = page.run("[...document.querySelectorAll('[data-stage-rank]')].map(c => c.innerText)")
    assert ranks == ["0", "1", "2", "3"]


def test_every_schedule_can_be_drawn(page):
    for index in range(len(candidates())):
        page.run(f"choose({index})")
        page.settle()
        assert page.run("element('chart').height") > 0


def test_zoom_and_pan(page):
    x, y = page.middle_of("#chart")
    page.click(*page.middle_of("#zoom-in"))
    assert page.run("chart.view[1] - chart.view[0]") == pytest.approx(33 * 0.6)

    x, y = page.middle_of("#chart")
    before = page.run("chart.view[0]")
    page.drag((x, y), (x + 100, y))
    assert page.run("chart.view[0]") < before

    page.page.keyboard.down("Control")
    page.wheel(x, y, -120)
    page.page.keyboard.up("Control")
    assert page.run("chart.view[1] - chart.view[0]") < 33 * 0.6
    page.click(*page.middle_of("#zoom-fit"))
    assert page.run("chart.view") == [0, 33]
    assert page.run("chart.selected") == -1


def test_plain_wheel_scrolls_the_page(page):
    x, y = page.middle_of("#chart")
    view = page.run("chart.view")

    page.wheel(x, y, 200)

    assert page.run("chart.view") == view


def test_keys_walk_through_the_timeline(page):
    page.run("element('chart').focus()")

    page.press("ArrowRight")
    assert details(page).startswith("0F0")
    page.press("ArrowRight")
    assert details(page).startswith("0F1")
    page.press("ArrowDown")
    assert details(page).startswith("1F0")
    page.press("Enter")
    assert details(page).startswith("0F0")
    page.press("+")
    assert page.run("chart.view[1] - chart.view[0]") < 33
    page.press("0")
    assert page.run("chart.view") == [0, 33]
    page.press("Escape")
    assert details(page) == ""


def test_tab_reaches_every_control(page):
    page.run("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id"))

    wanted = ["schedule", "microbatches", "zoom-in", "zoom-out", "zoom-fit", "critical", "chart"]
    assert [name for name in reached if name in wanted] == wanted


def test_transfers_are_drawn_and_can_be_hidden(page):
    assert page.run("getComputedStyle(element('transfers-label')).display") == "none"

    choose(page, "#schedule", "1F1B with transfers")
    with_them = page.run("element('chart').clientHeight")
    page.click(*page.middle_of("#transfers"))

    assert page.run("element('chart').clientHeight") < with_them


def test_critical_path_is_marked_on_request(page):
    before = page.run("element('chart').toDataURL()")

    page.click(*page.middle_of("#critical"))

    assert page.run("element('chart').toDataURL()") != before


def test_table_chooses_sorts_and_filters(page):
    rows = "[...document.querySelectorAll('tr[data-schedule]')].filter(r => !r.hidden)"
    assert set(page.run(f"{rows}.map(r => r.cells[1].innerText)")) == {"8"}

    page.click(*page.middle_of("#all"))
    assert page.run(f"{rows}.length") == len(candidates())
    page.click(*page.middle_of("table.sortable thead th:nth-child(4) button"))
    times = page.run(f"{rows}.map(r => Number(r.cells[3].dataset.value))")
    assert times == sorted(times)
    page.click(*page.middle_of("table.sortable thead th:nth-child(4) button"))
    assert page.run(f"{rows}.map(r => Number(r.cells[3].dataset.value))") == sorted(
        times, reverse=True
    )

    page.click(*page.middle_of("tr[data-schedule='0'] button"))
    assert page.run("[chart.schedule.name, chart.schedule.microbatches]") == ["GPipe", 4]
    assert page.run("document.querySelector('tr.chosen').dataset.schedule") == "0"


@pytest.mark.parametrize("dark", [False, True])
def test_phone_shows_all_without_scrolling_sideways(open_view, dark):
    page = open_view(size=(360, 740), phone=True, dark=dark)

    assert page.run("document.documentElement.scrollWidth") <= 360
    small = page.run(
        "[...document.querySelectorAll('.controls select, .controls button')]"
        ".filter(e => e.getBoundingClientRect().height < 36).length"
    )
    assert small == 0
    index = page.run("chart.schedule.rows[2].compute[3]")
    page.page.touchscreen.tap(*place_of(page, index))
    page.settle()
    assert details(page) != ""


def test_dark_mode_is_dark(open_view):
    page = open_view(dark=True)

    background, ink = page.run(
        "(() => { const s = getComputedStyle(document.body);"
        "return [s.backgroundColor, s.color]; })()"
    )
    assert background == "rgb(20, 24, 29)"
    assert ink == "rgb(232, 235, 238)"
    box = page.run(
        "getComputedStyle(document.querySelector(`.graph svg g[fill='#f6f8fa'] rect`)).fill"
    )
    assert box == "rgb(27, 32, 39)"
    assert page.run("chart.colours.ink") == "#e8ebee"
