"""Timelines: sizes, and colours read back from the pixels at known times."""

import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from dflop_jax.records import FORWARD, RETURN, SEND, Event, Trace
from dflop_jax.report import panels
from dflop_jax.report import timeline as tl
from tests.report.runs import make_plan, pipeline_trace


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def rgb(colour: str) -> np.ndarray:
    return np.round(np.array(to_rgb(colour)) * 255).astype(int)


def share(picture: np.ndarray, colour: str) -> float:
    """Share of pixels that have a colour."""
    return float((np.abs(picture - rgb(colour)).max(-1) <= 2).mean())


def test_bars_stand_at_their_times_in_their_colours(tmp_path):
    events = (
        Event("enc", "vision", 0, "forward", 0.0, 0.25),
        Event("llm", "llm", 0, "forward", 0.25, 0.5),
        Event("llm", "llm", 0, "backward", 0.5, 1.0),
    )
    panel = panels.Panel("one", Trace(0, "measured", events), {}, ("enc", "llm", "spare"))
    tl.draw([panel], {}, tmp_path / "t.png")
    image = pixels(tmp_path / "t.png")
    assert image.shape[1] == tl.WIDTH_IN * tl.DPI

    def at(row: int, time: float) -> np.ndarray:
        """Pixel of a bar of a submesh, above its number."""
        x = tl.LEFT_IN + time * (tl.WIDTH_IN - tl.LEFT_IN - tl.RIGHT_IN)
        y = tl.FOOT_IN + 0.2 + (3 - row - 0.5 + 0.3) * tl.ROW_IN  # 0.2: one row of the legend
        return image[round(image.shape[0] - y * tl.DPI), round(x * tl.DPI)]

    vision, llm = panels.MODULE_COLOURS["vision"], panels.MODULE_COLOURS["llm"]
    idle = panels.IDLE
    for row, time, colour in [
        (0, 0.13, vision[0]), (0, 0.45, idle), (0, 0.95, idle), (1, 0.13, idle), (1, 0.33, llm[0]),
        (1, 0.77, llm[1]), (2, 0.47, idle),
    ]:  # fmt: skip
        assert np.abs(at(row, time) - rgb(colour)).max() <= 2, (row, time)


def test_rows_and_modules_follow_the_plan():
    trace = pipeline_trace({"zeta": (1.0, 1.0), "alpha": (1.0, 1.0)}, [1.0], "x")
    assert panels.Panel("x", trace).rows == ["zeta", "alpha"]
    assert panels.Panel("x", trace, {}, ("idle", "alpha")).rows == ["idle", "alpha", "zeta"]
    sends = [("llm", 0.0, FORWARD), ("enc", 0.5, FORWARD), ("enc → llm", 1.0, SEND),
             ("llm → enc", 2.0, RETURN)]  # fmt: skip
    events = tuple(Event(name, "vision", 0, way, at, at + 1.0) for name, at, way in sends)
    panel = panels.panel_of(make_plan().layout, Trace(0, "x", events), "x")
    assert panel.rows == ["enc", "enc → llm", "llm", "llm → enc"]
    assert panel.links == {"enc → llm": "enc", "llm → enc": "llm"}
    planned = panels.panel_of(make_plan().layout, trace, "x")
    assert planned.modules == {"vision": "vision", "llm": "llm"}
    assert planned.submeshes == ["enc", "llm"]
    assert list(panels.legend_entries([planned]))[:2] == ["zeta forward", "zeta backward"]
    colours = panels.palette(["eye", "llm", "ear", "hand", "nose"])
    assert colours["llm"] == panels.MODULE_COLOURS["llm"]
    assert [colours[m] for m in ("eye", "ear", "hand")] == [*panels.OTHER_COLOURS]
    assert colours["nose"] == colours["eye"]  # there are only so many


@pytest.mark.parametrize("seconds, groups", [(1e-5, 1), (1e-2, 120), (900.0, 1)])
def test_any_scale_and_size_draws_without_a_warning(tmp_path, seconds, groups):
    stages = {f"submesh with a long name {i}": (seconds, 2 * seconds) for i in range(5)}
    tl.draw(
        [panels.Panel("x", pipeline_trace(stages, [1.0] * groups, "x"))], {}, tmp_path / "t.png"
    )
    assert share(pixels(tmp_path / "t.png"), panels.IDLE) > 0.01
    for n in (0, 1, 2):
        curve = [float(i) for i in range(n)], [math.nan] * (n // 2) + [1.0] * (n - n // 2)
        tl.draw([], {"run": curve, "other": curve}, tmp_path / "l.png")
        for colour in panels.LINE_COLOURS[:2]:  # the legend at least
            assert share(pixels(tmp_path / "l.png"), colour) > 0


def test_matplotlib_is_loaded_only_to_draw():
    code = "import sys, dflop_jax.report.compare, dflop_jax.report.html; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "dflop_jax.report.panels" in loaded.split()
    assert "matplotlib" not in loaded.split()
