"""`benchmarks/schedule.py` from the command line: rows, table and picture."""

import importlib.util
import json

import pytest

from .scripts import BENCHMARKS, refusal, run


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
    assert {"run", "LPT", "loongforge", "bridge", "entrain"} <= {r["method"] for r in rows}
    assert all(min(r["longest_over_mean"], r["unpadded_over_mean"]) >= 1 - 1e-9 for r in rows)
    assert all(r["busiest_over_mean"] >= r["longest_over_mean"] * (1 - 1e-9) for r in rows)
    busiest = {(r["data"], r["method"]): r["busiest_over_bound"] for r in rows}
    for (data, _), value in busiest.items():
        assert 1 - 1e-9 <= busiest[data, "run"] <= value * (1 + 1e-9)


@pytest.mark.slow
def test_quick_run_writes_rows_and_a_picture(tmp_path, traces):
    done = run(
        "schedule",
        *("--quick", "--seeds", "1:2", "--shapes", traces),
        *("--json", tmp_path / "rows.json", "--plot", tmp_path / "picture.png"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "powers of two" in done.stdout
    assert (tmp_path / "picture.png").stat().st_size > 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"n", "bins", "instance", "method", "makespan_over_bound", "ms"} <= set(rows[0])
    assert {r["seed"] for r in rows} == {1}
    assert {r["instance"] for r in rows} == {"shapes", "lognormal", "pareto"}
    assert all(r["makespan_over_bound"] >= 1 - 1e-9 for r in rows)
    span = {(r["n"], r["bins"], r["instance"], r["method"]): r["makespan_over_bound"] for r in rows}
    for n, bins, name, method in span:
        assert span[n, bins, name, "ours 0.1 s"] <= span[n, bins, name, method] * (1 + 1e-9)


@pytest.mark.slow
def test_parts_are_measured_alone_and_merged(tmp_path, traces):
    """Two methods in two runs; the better bound and "no answer" (null) survive the merge."""
    part = ["--sizes", "24x4", "--seeds", 1, "--quick", "--shapes", traces, "--methods"]
    for name in ("LPT", "ours"):
        done = run("schedule", *part, name, "--json", f"{name}.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "powers of two" not in done.stdout
    rows = json.loads((tmp_path / "LPT.json").read_text())
    assert {(r["n"], r["bins"], r["method"]) for r in rows} == {(24, 4, "LPT")}
    looser = {"makespan_over_bound": None, "makespan": None, "bound": rows[0]["bound"] / 2}
    rows.append(rows[0] | looser | {"method": "CP-SAT 10 s"})
    (tmp_path / "LPT.json").write_text(json.dumps(rows))
    done = run(
        "schedule",
        *("--merge", "LPT.json", "ours.json", "--json", "all.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "none (none)" in done.stdout
    assert "ours 0.1 s against CP-SAT 10 s: 1 better, 0 equal, 0 worse" in done.stdout
    rows = json.loads((tmp_path / "all.json").read_text())
    assert {r["method"] for r in rows} == {"LPT", "ours 0.1 s", "CP-SAT 10 s"}
    for r in rows:
        same = [q["bound"] for q in rows if q["instance"] == r["instance"]]
        assert r["bound"] == max(same)
        ratio = None if r["makespan"] is None else r["makespan"] / r["bound"]
        assert r["makespan_over_bound"] == ratio


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--seeds", 0), "'0' is neither a count of 1 or more nor FIRST:END"),
        (("--seeds", "5:5"), "'5:5' is neither"),
        (("--sizes", "512"), "'512' is not samples x bins"),
        (("--methods", "theirs"), "'theirs' is the start of none of: random"),
        (("--merge", "absent.json"), "absent.json"),
        (("--merge", BENCHMARKS / "cpsat.py"), "not rows that --json wrote"),
        (("--json", "absent/rows.json"), "no such folder"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal("schedule", *arguments)


def test_a_missing_solver_is_named_with_the_remedy(tmp_path):
    done = run(
        "schedule",
        *("--methods", "CP-SAT", "--cpsat-python", tmp_path / "no-such-python"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "CP-SAT left out" in done.stdout
    assert "dflop_jax[bench]" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="ortools is not installed")
def test_cpsat_solves_a_small_instance():
    task = {"costs": [[3, 1], [3, 1], [2, 4], [2, 4]], "n_bins": 2}
    task |= {"time_limit_s": 5.0, "workers": 1}
    done = run("cpsat", input=json.dumps(task))
    bins = json.loads(done.stdout)["bins"]
    assert bins[0] != bins[1]
    assert bins[2] != bins[3]
