"""The page in a real browser: what it draws, and what wheel, drag, keys and focus do."""

from __future__ import annotations

import pytest

from dflop_jax.report.html import write_page
from tests.report.browser import Browser, missing
from tests.report.runs import read_traces
from tests.report.test_html import charted_run, hostile_run

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: no page to look at")

BOXES = """
return [...document.querySelectorAll(".plot")].map((plot) => {
  const left = plot.getBoundingClientRect().left;
  return [...plot.querySelectorAll(".task")].map((task) => {
    const box = task.getBoundingClientRect();
    return [box.left - left, box.width, task.style.display, box.left + box.width / 2,
            box.top + box.height / 2];
  });
});
"""
RANGE = "const d = document.getElementById('range').dataset; return [Number(d.from), Number(d.to)]"
TIP = "const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText"
TO_TIMELINES = "document.getElementById('timelines').scrollIntoView()"
RIGHT, DOWN, TAB = "\ue014", "\ue015", "\ue004"


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def memory(folder, plan, trace, labels):
    return {
        "enc": ((0.0, 4 * 2.0**20), (0.1, 9 * 2.0**20), (0.3, 5 * 2.0**20)),
        "llm": ((0.0, 2.0**20),),
    }


@pytest.fixture
def shown(browser, make_run, tmp_path):
    """Function that opens the page of two runs of two traces each; gives their traces."""

    def show(width: int = 1280, **more):
        runs = [make_run("blind", slow=2.0), make_run("dflop")]
        browser.show(write_page(runs, tmp_path / "r.html", memory), width, **more)
        browser.js(TO_TIMELINES)
        return [t for run in runs for t in read_traces(run)]

    yield show
    assert browser.complaints() == []


def plot_box(browser):
    return browser.js(
        "const b = document.querySelector('.plot').getBoundingClientRect();"
        "return [b.left, b.top, b.width]"
    )


def test_every_task_is_a_mark_at_its_time(browser, shown):
    traces = shown()
    _, _, width = plot_box(browser)
    span = max(t.makespan_s for t in traces)
    panels = browser.js(BOXES)
    assert [len(p) for p in panels] == [len(t.events) for t in traces]
    assert browser.js(RANGE) == [0, pytest.approx(span)]
    for trace, marks in zip(traces, panels, strict=True):
        for e, (left, wide, *_) in zip(trace.events, marks, strict=True):
            assert left == pytest.approx(e.start_s / span * width, abs=0.5)
            assert wide == pytest.approx((e.end_s - e.start_s) / span * width, abs=0.7)
    tops = {(e.submesh, m[4]) for e, m in zip(traces[0].events, panels[0], strict=True)}
    assert len(tops) == 2  # a row per submesh


def test_hover_and_focus_tell_the_task(browser, shown):
    trace = shown()[0]
    at = next(i for i, e in enumerate(trace.events) if e.direction == "backward" and e.group == 0)
    event, (*_, x, y) = trace.events[at], browser.js(BOXES)[0][at]
    browser.hover(x, y)
    lines = browser.js(TIP).split("\n")
    told = dict(zip(lines[1::2], lines[2::2], strict=True))
    assert lines[0] == f"{event.segment} backward"
    assert (told["submesh"], told["group"]) == (event.submesh, "0")
    assert told["bucket"] == "vision 8 x 16 tokens"
    assert told["trace"] == "blind, step 5, measured"
    assert told["duration"].endswith(" ms")
    assert float(told["duration"][:-3]) == pytest.approx(
        (event.end_s - event.start_s) * 1e3, rel=0.01
    )
    assert float(told["start"][:-3]) == pytest.approx(event.start_s * 1e3, abs=1.0)
    browser.hover(5, 5)
    assert browser.js(TIP) == ""
    # By keyboard: one stop per timeline, arrows lead from task to task.
    browser.js("document.querySelector('[data-do=reset]').focus()")
    browser.press(TAB)
    assert browser.js(TIP).startswith("enc forward\n")
    first = browser.js("return document.activeElement.getBoundingClientRect().left")
    browser.press(RIGHT)
    assert browser.js("return document.activeElement.getBoundingClientRect().left") > first
    label = browser.js("return document.activeElement.getAttribute('aria-label')")
    assert label.startswith("enc forward, submesh enc, group 1,")
    browser.press(DOWN)
    assert browser.js(TIP).startswith("llm ")


def test_the_wheel_zooms_about_the_pointer_and_keys_reset(browser, shown):
    traces = shown()
    span = max(t.makespan_s for t in traces)
    left, top, width = plot_box(browser)
    browser.wheel(left + 0.25 * width, top + 30, 300)  # out of everything: the page scrolls instead
    assert browser.js(RANGE) == [0, pytest.approx(span)]
    browser.js(TO_TIMELINES)
    before = browser.js(BOXES)[0][0][1]
    browser.wheel(left + 0.25 * width, top + 30, -120)
    low, high = browser.js(RANGE)
    assert high - low < 0.8 * span
    assert low + 0.25 * (high - low) == pytest.approx(0.25 * span, rel=0.02)
    marks = [m for m in browser.js(BOXES)[0] if m[2] != "none"]
    assert 0 < len(marks) < len(traces[0].events)
    assert browser.js(BOXES)[2][0][1] != before
    browser.press("0")  # nothing of the page has the focus
    browser.js("document.querySelector('[data-do=in]').focus()")
    browser.press("+")
    assert browser.js(RANGE)[1] - browser.js(RANGE)[0] == pytest.approx((high - low) / 2)
    for key in "--------":
        browser.press(key)
    assert browser.js(RANGE) == [0, pytest.approx(span)]
    browser.js("document.querySelector('[data-do=in]').click()")
    assert browser.js(RANGE) == [pytest.approx(span / 4), pytest.approx(3 * span / 4)]
    browser.press("0")
    assert browser.js(RANGE) == [0, pytest.approx(span)]


def test_a_drag_marks_a_range_and_then_moves_it(browser, shown):
    span = max(t.makespan_s for t in shown())
    left, top, width = plot_box(browser)

    def drag(start, end):
        x = [round(left + f * width) for f in (start, end)]
        browser.pointer(
            {"type": "pointerMove", "x": x[0], "y": round(top + 30)}, {"type": "pointerDown"}
        )
        browser.pointer({"type": "pointerMove", "x": x[1], "y": round(top + 30)})
        band = browser.js("return document.querySelector('.band').getAttribute('visibility')")
        browser.pointer({"type": "pointerUp"})
        return band

    assert drag(0.5, 0.25) == "visible"  # leftwards is as good
    low, high = browser.js(RANGE)
    assert (low / span, high / span) == (
        pytest.approx(0.25, abs=0.01),
        pytest.approx(0.5, abs=0.01),
    )
    assert drag(0.8, 0.3) == "hidden"
    moved = browser.js(RANGE)
    assert moved[0] == pytest.approx(low + 0.5 * (high - low), abs=0.01 * span)
    assert moved[1] - moved[0] == pytest.approx(high - low)
    drag(0.02, 0.98)
    drag(0.02, 0.98)
    assert browser.js(RANGE)[0] == 0  # it stops at the start


def test_memory_is_drawn_to_scale_and_told(browser, shown):
    shown()
    left, _, width = plot_box(browser)
    strip = browser.js(
        "return [...document.querySelectorAll('.plot')].map((plot) => "
        "[...plot.querySelectorAll('.curve')].map((c) => { const b = c.getBoundingClientRect(); "
        "return [b.left, b.width, b.top, b.bottom]; }))"
    )
    assert [len(p) for p in strip] == [2, 2, 2, 2]
    (_, wide, top, bottom), _ = strip[0]
    span = browser.js(RANGE)[1]
    assert wide == pytest.approx(0.3 / span * width, abs=2)
    browser.hover(left + 0.2 / span * width, (top + bottom) / 2)
    assert browser.js(TIP).split("\n")[1:] == ["enc", "9.0 MiB", "llm", "1.0 MiB"]
    assert "enc, at most 9.0 MiB" in browser.js(
        "return document.querySelector('.memory').innerText"
    )


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_window_in_light_and_dark(browser, shown, width, dark):
    shown(width, dark=dark)
    assert browser.js("return document.documentElement.scrollWidth") <= width
    ground = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 27)") is dark
    outside = browser.js(
        "return [...document.querySelectorAll('#panels text, #axis text')].filter((t) => {"
        "const b = t.getBoundingClientRect(); return b.left < -0.5 || b.right > innerWidth + 0.5;"
        "}).map((t) => t.textContent)"
    )
    assert outside == []


def test_names_stay_text(browser, tmp_path):
    run = hostile_run(tmp_path)
    browser.show(write_page([run], tmp_path / "r.html"))
    assert browser.js("return window.bad") is None
    assert browser.js("return document.querySelector('h1').textContent") == run.name
    assert browser.js("return document.images.length") == 0
    assert len(browser.js(BOXES)[0]) == 3
    browser.js("document.querySelector('.task[tabindex]').focus()")
    assert "</script>" in browser.js(TIP)
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [400, 1280])
def test_charts_show_the_values_of_a_step(browser, tmp_path, width):
    runs = [charted_run(tmp_path / name) for name in ("first", "second")]
    browser.show(write_page(runs, tmp_path / "r.html"), width)
    titles = browser.js(
        "return [...document.querySelectorAll('.chart figcaption')].map((c) => c.textContent)"
    )
    assert titles[0] == "loss"
    assert {"step time", "step time by phase, first", "padding", "memory in use"} <= set(titles)
    assert "host, first 2.00 GiB" in browser.js("return figures.get('memory in use').key.innerText")
    assert browser.js("return document.documentElement.scrollWidth") <= width
    browser.js("figures.get('loss').out.focus()")
    browser.press("\ue012")
    assert browser.js(TIP).startswith("step 4")
    assert browser.complaints() == []
