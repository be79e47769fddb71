"""`benchmarks/wrong_lines.py` with two lines as processes."""

from __future__ import annotations

import json

from tests.benchmarks.scripts import module

script = module("wrong_lines")


def test_a_row_of_every_line(tmp_path, monkeypatch, capsys):
    lines = {"train --modle qwen": "did you mean --model?", "train gone.py": "something else"}
    monkeypatch.setattr(script, "WRONG", lines)
    monkeypatch.setattr(script, "careless_folder", lambda folder: folder)
    script.main(["--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [r["line"] for r in rows] == list(lines)
    assert [(r["right"], r["exit_code"], r["lines"]) for r in rows] == [(True, 2, 1), (False, 2, 1)]
    assert "train gone.py: exit 2" in capsys.readouterr().out
