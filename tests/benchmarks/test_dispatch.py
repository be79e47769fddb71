"""`benchmarks/dispatch.py`: its rows, on instances that take no time."""

import json
import sys

from .scripts import module


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
