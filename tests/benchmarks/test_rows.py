"""Every benchmark starts and explains itself, and its rows are written as they are made."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from tests.benchmarks.scripts import BENCHMARKS, module

json_rows = module("json_rows")
SCRIPTS = [f.stem for f in BENCHMARKS.glob("*.py") if "\ndef main(" in f.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_explains_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit_call:
        module(name).main()
    assert exit_call.value.code == 0
    options = capsys.readouterr().out
    assert "--json" in options or "rows.jsonl" in options


def test_rows_are_printed_and_written(tmp_path, capsys):
    @dataclass(frozen=True)
    class Row:
        name: str
        value: float

    file = tmp_path / "rows.json"
    rows = json_rows.Rows(file, json_rows.as_rows)
    for i, value in enumerate((1.0, np.float32(0.5), float("inf"))):
        rows.append(Row(f"{tmp_path.name}{i}", value))
        assert len(json.loads(file.read_text())["rows"]) == i + 1
    assert [r["value"] for r in json.loads(file.read_text())["rows"]] == [1.0, 0.5, None]
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert list(tmp_path.iterdir()) == [file]


def test_a_row_that_cannot_be_written_leaves_those_before_it(tmp_path):
    file = tmp_path / "rows.json"
    rows = json_rows.Rows(file)
    rows.append({"n": 1})
    with pytest.raises(TypeError, match="a Image has no form"):
        rows.append({"n": Image.new("L", (1, 1))})
    assert json.loads(file.read_text()) == [{"n": 1}]
