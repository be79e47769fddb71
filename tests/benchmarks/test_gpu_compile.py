"""`benchmarks/gpu_compile.py`: its plans, what it complains of, and what it refuses."""

import importlib.util
import json

import pytest

from tests.benchmarks import scripts

script = scripts.module("gpu_compile")

GOOD = {"error": "", "f32_dot_flops": 1.0, "flops": 100.0, "attention_gathers": 0, "program": "p"}


@pytest.mark.parametrize("model", script.MODELS)
def test_every_case_is_a_plan_of_its_degrees(model):
    cases = [c for c in script.CASES if c.model == model and c.arch == "sm_90"]
    assert len(cases) == 3 * 2 * 3
    for case in cases:
        job = case.job()
        plan, last = job.plan, job.plan.modules[-1]
        assert plan.n_devices in (8, 16)
        assert job.config.plan.devices == plan.n_devices
        meshes = [plan.submesh(s.submesh) for s in plan.segments_of(last)]
        assert {m.model for m in meshes} == {case.tensor}
        assert sum(m.stage for m in meshes) == case.stages
        apart = not {d for m in meshes for d in m.devices} & set(plan.submeshes[0].devices)
        assert apart == (case.policy == "dflop")


def test_cases_have_names_of_their_own():
    assert len({c.name for c in script.CASES}) == len(script.CASES) == 180
    assert {script.Case(*c) for c in script.QUICK} <= set(script.CASES)


def test_a_process_compiles_all_of_a_model_for_a_chip(monkeypatch):
    batches = []

    def refuse(jobs):
        batches.append([job.config.plan.hardware for job in jobs])
        yield from (f"{job.config.model.size} {job.config.plan.hardware}" for job in jobs)

    monkeypatch.setattr(script, "compile_plans", refuse)
    small, audio = "LLaVA-OneVision-0.5B", "Qwen2-Audio-7B"
    cases = [script.Case(m, "blind", t, 1, a) for t in (1, 2)
             for m, a in ((small, "sm_90"), (audio, "sm_80"))]  # fmt: skip
    told = dict(script.compile_cases(cases))
    assert batches == [["h100"] * 2, ["a100-80"] * 2]
    assert [told[c]["refused"] for c in cases] == [
        "llava-ov-0.5b h100",
        "qwen2-audio-7b a100-80",
    ] * 2


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({}, None),
        ({"f32_dot_flops": 1.1}, "1.1% of its products are in float32"),
        ({"attention_gathers": 4}, "4 gathers of whole heads"),
        ({"error": "no tile fits"}, "no tile fits"),
    ],
)
def test_what_is_wrong_is_told(change, complaint):
    found = script.problems({"case": {"rows": [GOOD | change]}})
    assert found == ([f"case: p: {complaint}"] if complaint else [])


def test_an_unknown_case_is_refused():
    assert "is in no name" in scripts.refusal("gpu_compile", "--only", "gpt")


def test_without_the_compiler_a_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gpu-compile" in scripts.refusal("gpu_compile", "--quick")


def test_a_file_of_all_cases_is_not_compiled_again(tmp_path, monkeypatch, capsys):
    cases = [script.Case(*c) for c in script.QUICK]
    done = {c.name: {"refused": "for a reason", "rows": []} for c in cases}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [], "cases": done}))
    monkeypatch.setattr(script, "compile_plans", None)
    monkeypatch.setattr("sys.argv", ["gpu_compile", "--quick", "--json", str(file)])
    assert script.main() == 0
    assert capsys.readouterr().out.count("refused: for a reason") == 2
