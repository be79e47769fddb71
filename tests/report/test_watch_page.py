"""The live page in a real browser, at two widths: it follows a run, and asks nobody else."""

import time

import pytest

from dflop_jax.report.run_folder import RunFolder
from tests.report.browser import Browser, missing
from tests.report.runs import make_row
from tests.report.test_watch import served

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: no page to look at")

TITLES = "return [...document.querySelectorAll('.chart figcaption')].map((c) => c.textContent)"
LAST = """
const made = figures.get(arguments[0]);
return made ? made.key.innerText : "";
"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def waited_for(browser, script, wanted, *args):
    until_s = time.monotonic() + 30
    while not wanted(said := browser.js(script, *args)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return said


def row(step, **more):
    phases = {"forward": 0.2, "backward": 0.25, "idle": 0.05}
    return make_row(step, phase_s=phases, imbalance={"llm": 0.1}, memory_bytes={"host": 2.0**31},
                    mfu_by_module={"llm": 0.4}, **more)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_it_follows_runs(browser, make_run, width):
    first, second = make_run("first", n_steps=3), make_run("second")
    with served(first, second) as server:
        browser.open(server.url, width)
        assert waited_for(browser, TITLES, bool)[0] == "loss"
        assert "first 1.667" in browser.js(LAST, "loss")
        with RunFolder(first, existing="resume") as run:
            run.restart(2)
            for step in range(2, 9):
                run.append(row(step, loss=0.25))
            said = waited_for(browser, LAST, lambda text: "0.2500" in text, "loss")
            assert "first 0.2500" in said
            titles = browser.js(TITLES)
            assert {"step time", "step time by phase, first", "MFU", "padding",
                    "memory in use"} <= set(titles)  # fmt: skip
            assert len(set(titles)) == len(titles)
            assert "host, first 2.00 GiB" in browser.js(LAST, "memory in use")
        status = "return document.getElementById('status').innerText"
        assert "first: 9 steps of 100" in browser.js(status)
        assert browser.js("return document.documentElement.scrollWidth") <= width
        asked = browser.js("return performance.getEntriesByType('resource').map((e) => e.name)")
        assert asked
        assert {name.partition("data?")[0] for name in asked} == {server.url}
        # Values at a step, by the keyboard.
        browser.js("figures.get('loss').out.focus()")
        browser.press("\ue012")
        tip = browser.js("return document.getElementById('tip').innerText")
        assert tip.startswith("step 11")
        assert browser.complaints() == []
    lost = "return document.getElementById('lost').hidden"
    assert waited_for(browser, lost, lambda hidden: not hidden) is False
    browser.open("about:blank", width)
    browser.complaints()  # that its server is gone
