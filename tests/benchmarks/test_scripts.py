"""Scripts of `benchmarks/` on instances that take seconds."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.data.media_cases import made_dataset

from .scripts import module, run

# ---- dispatch.py


def test_every_cost_has_rows_of_both_methods(tmp_path, monkeypatch):
    dispatch = module("dispatch")
    monkeypatch.setattr(dispatch, "SIZES", ((4, 24), (16, 60)))
    monkeypatch.setattr(dispatch, "WORK_S", {"dealt": 0.0, "evened": 0.005})
    monkeypatch.setattr(sys, "argv", ["dispatch", "--json", str(tmp_path / "rows.json")])
    assert dispatch.main() == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(r["ranks"], r["cost"], r["method"]) for r in rows] == [
        (n, cost, m) for n in (4, 16) for cost in dispatch.COSTS for m in ("dealt", "evened")
    ]
    for row in rows:
        assert 1 <= row["over_bound"] <= (1.05 if row["cost"] == "rows" else 1.2)
        assert 0 <= row["cross_node_share"] <= row["cross_node_share_naive"] <= 1
        assert row["elapsed_s"] > 0
    assert any(r["cross_node_share"] < r["cross_node_share_naive"] for r in rows)
    assert not any(r["cross_node_share_naive"] for r in rows if r["ranks"] == 4)


# ---- schedule.py


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    row = {"images": [[640, 480]], "video_s": None, "audio_s": None}
    row |= {"prompt_chars": 40, "answer_chars": 400}
    rows = [row, row | {"images": [], "video_s": 9.5}, row | {"audio_s": 3.0}]
    rows += [row | {"answer_chars": 100 * k, "images": []} for k in range(1, 40)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    return folder


@pytest.mark.slow
def test_what_runs_execute_is_measured(tmp_path, traces):
    """Every method places every sample (the benchmark asserts it), and the run's is the best."""
    done = run(
        "schedule_run",
        *("--sizes", "24x4", "--seeds", 1, "--effort", "quick"),
        *("--shapes", traces, "--json", tmp_path / "rows.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "best or equal to first fit" in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    names = {"samples", "ranks", "method", "static_over_bound", "busiest_over_bound"}
    assert names | {"content_over_bound", "work", "elapsed_s", "cpu_s"} <= set(rows[0])
    assert {"run", "greedy", "LPT", "first fit"} == {r["method"] for r in rows}
    assert all(r["longest_over_mean"] >= 1 - 1e-9 for r in rows)
    assert all(r["busiest_over_mean"] >= r["longest_over_mean"] * (1 - 1e-9) for r in rows)
    busiest = {(r["data"], r["method"]): r["busiest_over_bound"] for r in rows}
    for (data, _), value in busiest.items():
        assert 1 - 1e-9 <= busiest[data, "run"] <= value * (1 + 1e-9)


# ---- packing_exact.py


packing_exact, families = module("packing_exact"), module("packing_families")
SMALL = {
    "small": families.Family("tests.small:build", ""),
    "gemma3_text": families.FAMILIES["gemma3_text"],
}


def pack(monkeypatch, tmp_path, *arguments):
    """(exit code, what --json holds) of a call in this process, with few cases."""

    def here(counts, **how):
        yield from (packing_exact.measure(*job, **how) for job in counts.items())

    for owner in (packing_exact, families):
        monkeypatch.setattr(owner, "FAMILIES", SMALL)
    monkeypatch.setattr(packing_exact, "LEAST_CASES", 3)
    monkeypatch.setattr(packing_exact, "measured", here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--json", "rows.json"])
    return packing_exact.main(), json.loads(Path("rows.json").read_text())


@pytest.mark.slow
def test_packed_samples_leave_each_other_alone(monkeypatch, tmp_path):
    code, said = pack(monkeypatch, tmp_path, "--cases", "7")
    assert (code, said["cases"]) == (0, 7)
    assert {name: f["cases"] for name, f in said["families"].items()} == {
        "small": 4,
        "gemma3_text": 3,
    }
    for family in said["families"].values():
        assert family["leaks"] == family["over"] == 0
        assert 0 < family["max_error_alone"] <= 1e-5
        assert 1e-7 < family["max_rounding"] < 1e-4


# ---- gpu_step.py


@pytest.mark.slow
def test_a_tiny_run_without_a_gpu(tmp_path):
    out = run("gpu_step", "--tiny", "--json", tmp_path / "out.json", cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    lines = json.loads((tmp_path / "out.json").read_text())
    assert [json.loads(text)["name"] for text in out.stdout.splitlines()] == [
        line["name"] for line in lines
    ]
    assert lines[0]["kind"] == "cpu"
    assert lines[-1]["errors"] == 0
    assert lines[-1]["compiles"] > 0
    assert not [line for line in lines if "skipped" in line]
    found = {(line["part"], line["name"]) for line in lines if "part" in line}
    assert {part for part, _ in found} == {"ceilings", "attention", "segments", "head", "step"}
    assert {("attention", "attention tiles"), ("step", "trace")} < found
    assert all(line.get("ms", 1.0) > 0 for line in lines)
    segments = [line for line in lines if line["name"] == "segment backward"]
    assert {line["of"] for line in segments} == {"inner", "last", "encoder"}
    errors = [e for line in lines[:-1] for e in line.get("errors", ())]
    assert len(errors) == 8  # output and gradients of q, k and v by both kernels
    assert all(0 < e < 0.03 for e in errors)
    (step,) = (line for line in lines if line["name"] == "step")
    assert step["tokens_per_s"] == pytest.approx(2 * 32 / step["ms"] * 1e3)


# ---- fuzz_data.py


fuzz_cases, fuzz_data = module("fuzz_cases"), module("fuzz_data")

CASES = 150
FOLDERS = {".png": "images", ".jpg": "images", ".gif": "images", ".mp4": "videos", ".wav": "audio"}


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Media by kind, in folders as those of the shared data."""
    folder = tmp_path_factory.mktemp("media")
    for file in made_dataset(folder / "made").parent.iterdir():
        if kind := FOLDERS.get(file.suffix):
            (folder / kind).mkdir(exist_ok=True)
            shutil.copy(file, folder / kind)
    return folder


@pytest.mark.slow
def test_mutated_files_are_samples_or_named_as_bad(media):
    counts, findings = fuzz_data.run(range(CASES), 1, media, 300)
    assert findings == []
    assert counts.total() == CASES
    results = {r: sum(n for key, n in counts.items() if key.endswith(r)) for r in ("good", "bad")}
    assert sum(results.values()) == CASES
    assert min(results.values()) > CASES / 10
    assert {key.partition(" ")[0] for key in counts} == {w.__name__ for w, _ in fuzz_cases.WAYS}


# ---- gpu_compile.py

gpu_compile = module("gpu_compile")


def test_a_file_of_all_cases_is_not_compiled_again(tmp_path, monkeypatch, capsys):
    cases = [gpu_compile.Case(*c) for c in gpu_compile.QUICK]
    done = {c.name: {"refused": "for a reason", "rows": []} for c in cases}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [], "cases": done}))
    monkeypatch.setattr(gpu_compile, "compile_plan", None)
    monkeypatch.setattr("sys.argv", ["gpu_compile", "--quick", "--json", str(file)])
    assert gpu_compile.main() == 0
    assert capsys.readouterr().out.count("refused: for a reason") == 2
