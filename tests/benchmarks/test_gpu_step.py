"""`benchmarks/gpu_step.py` on toy sizes without a GPU, and what it knows by itself."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from .scripts import BENCHMARKS, module, refusal

SCRIPT = BENCHMARKS / "gpu_step.py"
# Runs a script and says which packages it needed.
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def script():
    return module("gpu_step")


def test_a_tiny_run_without_a_gpu(tmp_path):
    arguments = ["--tiny", "--json", str(tmp_path / "out.json")]
    out = subprocess.run(
        [sys.executable, "-c", RUN, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert out.returncode == 0, out.stderr
    assert "dflop_jax" not in out.stderr.splitlines()[-1].split()
    record = json.loads((tmp_path / "out.json").read_text())
    rows = record["rows"]
    assert out.stdout.startswith("No GPU: jax sees only cpu.")
    assert record["compiles"] > 0
    assert record["late_compiles"] == 0
    assert record["skipped"] == []
    assert {(r["name"], r["direction"]) for r in rows} == {
        (name, direction)
        for name in ("attention pallas", "attention xla", "2 decoder layers", "2 vision layers")
        for direction in ("forward", "forward+backward")
    }
    assert all(r["ms"] > 0 and r["tflops"] > 0 for r in rows)
    errors = [r["errors"] for r in rows if r["errors"]]
    assert len(errors) == 2  # of the shortest row, both kernels: output, gradients of q, k and v
    assert all(0 < e < 0.03 for each in errors for e in each)
    assert out.stdout.count("attention pallas") == sum(r["name"] == rows[0]["name"] for r in rows)


def test_without_a_gpu_it_says_so():
    said = refusal("gpu_step")
    assert said.startswith("No GPU: jax sees only cpu.")
    assert "give --tiny" in said


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H200", 989.4),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks(script, kind, peak):
    assert script.peak_tflops(kind) == peak


@pytest.mark.parametrize("tokens", [128, 8192])
def test_rows_are_packed(script, tokens):
    ids, lengths = script.packed_row(tokens, 100)
    assert ids.shape == (1, tokens)
    assert 0.98 * tokens <= sum(lengths) <= tokens
    np.testing.assert_array_equal(np.bincount(ids[0])[1:], lengths)
    assert (np.diff(ids[0][: sum(lengths)]) >= 0).all()
    assert not ids[0][sum(lengths) :].any()
