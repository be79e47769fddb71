"""Chrome traces: every event comes back, and the file has what Perfetto needs."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from dflop_jax.records import Event, Schedule, Shape, Trace
from dflop_jax.report.trace import group_labels, read_trace, write_trace
from tests.report.runs import pipeline_trace
from tests.rows import group_of_rows

TRACE = pipeline_trace(
    {"enc": (0.0123, 0.03), "llm": (0.02, 0.0456789)}, [1.0, 0.3, 2.0], "measured"
)


def assert_close(a: Trace, b: Trace) -> None:
    assert (a.step, a.source, len(a.events)) == (b.step, b.source, len(b.events))
    for x, y in zip(a.events, b.events, strict=True):
        assert replace(x, start_s=0.0, end_s=0.0) == replace(y, start_s=0.0, end_s=0.0)
        assert abs(x.start_s - y.start_s) <= 1e-9
        assert abs(x.end_s - y.end_s) <= 1e-9


LONG = Trace(7, "simulated", (Event("a", "b", 0, "forward", 1e-7, 3600.0),))


@pytest.mark.parametrize("traces", [[], [Trace(0, "simulated", ())], [TRACE, LONG]])
def test_traces_come_back(tmp_path, traces):
    write_trace(tmp_path / "trace.json", traces, {0: "vision:8x16"})
    back = [trace for trace, _ in read_trace(tmp_path / "trace.json")]
    assert len(back) == len(traces)
    for a, b in zip(traces, back, strict=True):
        assert_close(a, b)


def test_the_file_is_what_perfetto_reads(tmp_path):
    write_trace(tmp_path / "trace.json", [TRACE, TRACE], {0: "vision:8x16", 1: "llm:1x256"})
    obj = json.loads((tmp_path / "trace.json").read_text())
    events = obj["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * len(TRACE.events)
    assert {e["pid"] for e in slices} == {0, 1}
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"enc", "llm"}
    first = slices[0]
    task = {"segment": "enc", "direction": "forward", "group": 0}
    assert first["args"] == task | {"bucket": "vision:8x16"}
    assert first["dur"] == pytest.approx(12300)  # microseconds
    assert "bucket" not in next(e for e in slices if e["args"]["group"] == 2)["args"]


def test_groups_are_called_by_module_and_shape():
    first = group_of_rows("eye", Shape(2, 9), ((((0,), ()),),), feeds=(1,))
    second = group_of_rows("text", Shape(1, 64), ((((0,),),),))
    schedules = [Schedule(0, (first, second)), Schedule(1, (second,))]
    assert group_labels(schedules) == {0: "eye:2x9", 1: "text:1x64", 2: "text:1x64"}


def test_neighbouring_slices_do_not_overlap_after_rounding(tmp_path):
    ends = [0.1 * i / 3 for i in range(200)]
    events = [Event("a", "a", i, "forward", s, e) for i, (s, e) in enumerate(pairwise(ends))]
    write_trace(tmp_path / "trace.json", [Trace(0, "s", tuple(events))])
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in written if e["ph"] == "X"]
    for a, b in pairwise(slices):
        assert round((a["ts"] + a["dur"]) * 1e3) == round(b["ts"] * 1e3)
