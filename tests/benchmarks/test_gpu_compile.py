"""`benchmarks/gpu_compile.py`: its plans, what it complains of, and what it refuses."""

import json
from dataclasses import replace

import pytest

from dflop_jax.aot.reports import ProgramReport
from dflop_jax.records import LayerTiming, ModelProfile, Recompute, Shape
from tests.benchmarks import scripts
from tests.plans import params

script = scripts.module("gpu_compile")

GOOD = {"error": "", "f32_dot_flops": 1.0, "flops": 100.0, "program": "p"}


@pytest.mark.parametrize("model", script.MODELS)
def test_every_case_is_a_plan_of_its_degrees(model):
    cases = [c for c in script.CASES if c.model == model and c.arch == "sm_90"]
    assert len(cases) == 3 * 2 * 3
    for case in cases:
        job = case.job()
        plan, last = job.plan, job.plan.layout.modules[-1]
        assert plan.layout.n_devices in (8, 16)
        assert job.config.plan.devices == plan.layout.n_devices
        meshes = [plan.layout.submesh(s.submesh) for s in plan.layout.segments_of(last)]
        assert {m.model for m in meshes} == {case.tensor}
        assert sum(m.stage for m in meshes) == case.stages
        apart = not {d for m in meshes for d in m.devices} & set(plan.layout.submeshes[0].devices)
        assert apart == (case.policy == "dflop")


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({}, None),
        ({"f32_dot_flops": 1.1}, "1.1% of its products are in float32"),
        ({"error": "no tile fits"}, "no tile fits"),
    ],
)
def test_what_is_wrong_is_told(change, complaint):
    found = script.problems({"case": {"rows": [GOOD | change]}})
    assert found == ([f"case: p: {complaint}"] if complaint else [])


def test_a_row_has_what_is_predicted():
    case = script.Case("LLaVA-OneVision-0.5B", "dflop", 1, 1, "sm_90")
    plan = case.job().plan
    timings = tuple(
        LayerTiming(m, 1, s, 1.0, 2.0, 1.0, 2.0, 10.0 * s.size,
                    recompute={r: Recompute(layer_bytes=s.size, temp_bytes=5.0 * s.size)
                               for r in ("none", "layers")})
        for m, s in (("vision", Shape(8, 729)), ("llm", Shape(1, 4096)))
    )  # fmt: skip
    layers = {m: plan.layout.segments_of(m)[-1].stop for m in plan.layout.modules}
    profile = ModelProfile(
        "k", "h100", timings, *[params(dict.fromkeys(layers, 400))] * 2, layers,
        dict.fromkeys(layers, 0.5), 8.0, edges=plan.layout.edges, piece_tokens={"vision": 729},
    )  # fmt: skip
    costs = script.CostModel(profile)
    report = ProgramReport(
        "vision backward 8x729", "vision", "vision", "backward", (1, 4, 1), needed_flops=4e12,
        temp_bytes=7.0, output_bytes=5.0, aliased_bytes=4.0,
    )  # fmt: skip
    row = script.row(case, report, plan, costs)
    assert row["actual_bytes"] == 8.0
    assert row["predicted_bytes"] == pytest.approx(5.0 * 8 * 729)
    ahead = script.row(case, replace(report, kind="forward", handed_bytes=3.0), plan, costs)
    assert ahead["actual_bytes"] == 3.0
    assert ahead["predicted_bytes"] == pytest.approx(layers["vision"] * 8 * 729)
    other = script.row(case, replace(report, kind="reduce", needed_flops=0.0), plan, costs)
    assert other["predicted_bytes"] is None
    peaks = script.with_peaks(case.job(), costs).plan.predicted.peak_bytes
    assert set(peaks) == set(plan.layout.modules)


def test_an_unknown_case_is_refused():
    assert "is in no name" in scripts.refusal("gpu_compile", "--only", "gpt")


def test_a_file_of_all_cases_is_not_compiled_again(tmp_path, monkeypatch, capsys):
    cases = [script.Case(*c) for c in script.QUICK]
    done = {c.name: {"refused": "for a reason", "rows": []} for c in cases}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [], "cases": done}))
    monkeypatch.setattr(script, "compile_plan", None)
    monkeypatch.setattr("sys.argv", ["gpu_compile", "--quick", "--json", str(file)])
    assert script.main() == 0
    assert capsys.readouterr().out.count("refused: for a reason") == 2
