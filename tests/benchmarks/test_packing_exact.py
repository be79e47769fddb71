"""`benchmarks/packing_exact.py`, short: a small model and one with two kinds of layers and windows
are packed exactly, and would not be without what keeps pieces apart."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from models import gemma

from .scripts import module

script = module("packing_exact")
cases = module("packing_cases")
families = module("packing_families")
Seen = cases.Seen
SMALL = {
    "small": families.Family("tests.small:build", ""),
    "gemma3_text": families.FAMILIES["gemma3_text"],
}


def answer(monkeypatch, tmp_path, *arguments):
    """(exit code, what --json holds) of a call in this process, with few cases."""

    def here(counts, **how):
        yield from (script.measure(*job, **how) for job in counts.items())

    for owner in (script, families):
        monkeypatch.setattr(owner, "FAMILIES", SMALL)
    monkeypatch.setattr(script, "LEAST_CASES", 3)
    monkeypatch.setattr(script, "measured", here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--json", "rows.json"])
    return script.main(), json.loads(Path("rows.json").read_text())


@pytest.mark.slow
def test_packed_samples_leave_each_other_alone(monkeypatch, tmp_path):
    code, said = answer(monkeypatch, tmp_path, "--cases", "7")
    assert (code, said["cases"]) == (0, 7)
    assert {name: f["cases"] for name, f in said["families"].items()} == {
        "small": 4,
        "gemma3_text": 3,
    }
    for family in said["families"].values():
        assert family["leaks"] == family["over"] == 0
        assert 0 < family["max_error_alone"] <= 1e-5
        assert 1e-7 < family["max_rounding"] < 1e-4


def test_a_row_that_is_one_piece_leaks(monkeypatch, tmp_path):
    how = ("--families", "small", "--without", "resets", "--cases", "6")
    code, said = answer(monkeypatch, tmp_path, *how)
    assert code == 0
    assert said["families"]["small"]["leaks"] > 0
    assert said["families"]["small"]["max_error_alone"] > 1e-2
    assert said["families"]["small"]["over"] > 0


@pytest.mark.parametrize("error, rounding, over", [
    (1e-5, 0.0, False), (2e-5, 1e-6, True), (2e-5, 1e-5, False), (4e-5, 1e-5, True),
    (float("nan"), 1.0, True), (1e-6, float("nan"), False), (2e-5, float("nan"), True),
])  # fmt: skip
def test_rounding_excuses_three_times_itself(error, rounding, over):
    assert script.is_over(error, rounding, "float32") == over


def seen(*values):
    output = np.array(values, np.float32)
    return Seen({"loss": np.float32(0.5), "llm": output}, {("llm", "up"): output})


def test_a_bit_is_a_leak_and_errors_are_shares():
    one, other = seen(1, -4), seen(1, np.nextafter(np.float32(-4), np.float32(0)))
    assert not cases.differ(one, seen(1, -4))
    assert cases.differ(one, other)
    assert cases.differ(seen(1, np.nan), seen(1, np.nan))
    assert cases.largest_error(seen(1.5, -4), one) == 0.125
    assert np.isnan(cases.largest_error(seen(np.nan, -4), one))
    more = dataclasses.replace(one, outputs={**one.outputs, "loss": np.float32(0.75)})
    assert cases.largest_error(more, one) == 0.25


def test_packings_fill_rows_and_hold_whole_samples():
    model = gemma.build("gemma3-nano")
    packing, ways = cases.random_packing(model, families.drawings(model), np.random.default_rng(1))
    shapes = cases.shapes_of(model)
    assert len(packing.samples) == len(ways) > 1
    for m, rows in packing.rows.items():
        lengths = [n for s in packing.samples for n in s.load.lengths(m)]
        assert len(rows) == len(lengths)
        used = np.bincount(rows, lengths, shapes[m].rows)
        assert used.max() <= shapes[m].tokens
    again = [way(seed) for seed, way in enumerate(ways)]
    assert [s.load for s in again] == [s.load for s in packing.samples]
    assert any(
        not np.array_equal(a.fields["llm"]["tokens"], b.fields["llm"]["tokens"])
        for a, b in zip(again, packing.samples, strict=True)
    )
