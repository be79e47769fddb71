"""`benchmarks/many_traces.py`, with few processes."""

import json

from tests.benchmarks.scripts import module


def test_rows_of_both_plans(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    argv = ["many_traces.py", "--processes", "20", "--steps", "6", "--json", str(file)]
    monkeypatch.setattr("sys.argv", argv)
    module("many_traces").main()
    rows = json.loads(file.read_text())
    assert [r["plan"] for r in rows] == ["chain", "shared"]
    assert all(r["processes"] == 20 and r["spans"] > r["tasks"] for r in rows)
    assert all(0 < r["decode_s"] < r["finish_s"] for r in rows)
    assert all(min(r["learn_s"], r["decide_s"]) > 0 for r in rows)
