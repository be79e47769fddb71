"""One of the paper's experiments from end to end, on a model small enough for a test."""

import pytest

from experiments.paper import common, report, scaling, systems
from experiments.paper.common import outcome, prepare
from experiments.paper.systems import Setup
from models.llava import build

TINY = Setup("tiny", "tiny", "tiny")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(systems, "model_of", lambda _: build("anyres-nano", "bfloat16"))
    monkeypatch.setattr(common, "_KNOWN", {})
    return TINY


def test_an_experiment_runs_and_is_reported(tiny, tmp_path, capsys):
    found = scaling.run(tiny, nodes=(1,))
    assert [row[:2] for row in found.rows] == [["1", "256"], ["1", "32"]]
    for batch in (256, 32):
        d, *others = (
            outcome(tiny, s, 8, batch) for s in ("dflop", *common.BASELINES)
        )  # known already
        assert 0 <= d.idle_share < 1
        assert d.samples_per_s == pytest.approx(batch / d.step_s)
        assert all(o.idle_device_s > 0 for o in others)
        assert d.tuned.peak_bytes < common.MEMORY_SHARE * systems.CLUSTER.memory_bytes
    common.print_result(found)
    assert "the gap widens with nodes" in capsys.readouterr().out
    report.draw(found, tmp_path / "scaling.png")
    page = report.write_timelines(tiny, tmp_path, n_devices=8, global_batch=32)
    text = report.write_report([found], tmp_path, page, 1.0).read_text(encoding="utf-8")
    for row in found.rows:
        assert "| " + " | ".join(row) + " |" in text
    assert "![" + found.title + "](scaling.png)" in text
    assert "CC BY 4.0" in text
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    html = page.read_text(encoding="utf-8")
    assert "pytorch, simulated" in html
    assert "arrival" in html


def test_outcomes_are_remembered(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(common, "_outcome", lambda *key: asked.append(key) or "found")
    assert outcome(tiny, "dflop", 8, 32) == outcome(tiny, "dflop", 8, 32) == "found"
    assert asked == [(tiny, "dflop", 8, 32)]
    prepare([(tiny, "dflop", 8, 32)])  # known, so nothing is started
    assert len(asked) == 1


def test_the_public_rule_is_a_system_of_its_own(tiny):
    found = outcome(tiny, "dflop-public", 4, 16)
    assert found.grouping == "balanced"
    assert found.step_s >= outcome(tiny, "dflop", 4, 16).step_s * 0.95
