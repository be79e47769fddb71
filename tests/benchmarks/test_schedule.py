"""`benchmarks/schedule_run.py` from the command line."""

import json

import pytest

from .scripts import run


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
