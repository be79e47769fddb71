"""`benchmarks/long_run.py`, of a short run."""

import json

from tests.benchmarks.scripts import module


def test_every_row_is_made_by_the_work_it_names(tmp_path, monkeypatch):
    long_run = module("long_run")

    def here(command, **options):
        monkeypatch.setattr("sys.argv", command[1:])
        long_run.main()

    monkeypatch.setattr(long_run.subprocess, "run", here)  # no process of its own
    file = tmp_path / "rows.json"
    argv = ["long_run.py", "--steps", "3000", "--samples", "2000", "--json", str(file)]
    monkeypatch.setattr("sys.argv", argv)
    long_run.main()
    rows = json.loads(file.read_text())
    assert [r["what"] for r in rows] == ["report", "summary", "resume", "samples seen"]
    assert all(r["seconds"] > 0 and r["peak_mb"] >= r["started_mb"] > 0 for r in rows)
    assert all((r["steps"], r["samples"]) == (3000, 2000) for r in rows)
