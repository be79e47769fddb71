"""`benchmarks/schedule.py` from the command line: rows, table and picture."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_quick_run_writes_rows_and_a_picture(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    row = {"images": [[640, 480]], "video_s": None, "audio_s": None}
    row |= {"prompt_chars": 40, "answer_chars": 400}
    lines = [row, row | {"images": [], "video_s": 9.5}, row | {"audio_s": 3.0}]
    (traces / "a.jsonl").write_text("\n".join(json.dumps(r) for r in lines))
    done = run(
        BENCHMARKS / "schedule.py",
        *("--quick", "--seeds", 1, "--shapes", traces),
        *("--json", tmp_path / "rows.json", "--plot", tmp_path / "picture.png"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "powers of two" in done.stdout
    assert (tmp_path / "picture.png").stat().st_size > 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"n", "bins", "instance", "method", "makespan_over_bound", "ms"} <= set(rows[0])
    assert {r["instance"] for r in rows} == {"embedded", "shapes", "lognormal", "pareto"}
    assert all(r["makespan_over_bound"] >= 1 - 1e-9 for r in rows)
    span = {(r["n"], r["bins"], r["instance"], r["method"]): r["makespan_over_bound"] for r in rows}
    for n, bins, name, method in span:
        assert span[n, bins, name, "ours 0.1 s"] <= span[n, bins, name, method] * (1 + 1e-9)


def test_no_seed_is_refused(tmp_path):
    done = run(BENCHMARKS / "schedule.py", "--seeds", 0, cwd=tmp_path)
    assert done.returncode == 2
    assert "--seeds 0 must be at least 1" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="ortools is not installed")
def test_cpsat_solves_a_small_instance():
    task = {"costs": [[3, 1], [3, 1], [2, 4], [2, 4]], "n_bins": 2}
    task |= {"time_limit_s": 5.0, "workers": 1}
    done = run(BENCHMARKS / "cpsat.py", input=json.dumps(task))
    bins = json.loads(done.stdout)["bins"]
    assert bins[0] != bins[1]
    assert bins[2] != bins[3]
