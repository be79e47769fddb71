"""`benchmarks/load_weights.py` from the command line, on a small checkpoint."""

import json
from pathlib import Path

import pytest

from .scripts import refusal, run


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_a_small_checkpoint(tmp_path):
    out = run("load_weights", "--gb", 0.02, "--width", 256, "--json", tmp_path / "out.json")
    assert out.returncode == 0, out.stderr
    row = json.loads((tmp_path / "out.json").read_text())
    assert row["file_mb"] == pytest.approx(20, rel=0.2)
    # Twice the bytes in float32, and both ends of the model on both stages.
    assert row["arrays_mb"] > 2 * row["file_mb"]
    on_host = row["arrays_on_host_mb"]
    assert row["transient_mb"] == pytest.approx(row["peak_over_baseline_mb"] - on_host)
    assert "transient" in out.stdout


@pytest.mark.parametrize("bad", [("--gb", "0"), ("--gb", "-1"), ("--width", "100"), ("--gb", "x")])
def test_bad_sizes(bad):
    assert bad[0] in refusal("load_weights", *bad)
