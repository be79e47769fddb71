"""`benchmarks/gpu_step.py` on toy sizes without a GPU, and what it knows by itself."""

import json

import numpy as np
import pytest

from .scripts import module, run


@pytest.fixture(scope="module")
def cases():
    return module("gpu_cases")


@pytest.mark.slow
def test_a_tiny_run_without_a_gpu(tmp_path):
    out = run("gpu_step", "--tiny", "--json", tmp_path / "out.json", cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    lines = json.loads((tmp_path / "out.json").read_text())
    assert [json.loads(text)["name"] for text in out.stdout.splitlines()] == [
        line["name"] for line in lines
    ]
    assert lines[0]["kind"] == "cpu"
    assert lines[-1]["errors"] == 0
    assert lines[-1]["compiles"] > 0
    assert not [line for line in lines if "skipped" in line]
    found = {(line["part"], line["name"]) for line in lines if "part" in line}
    assert found >= {
        ("ceilings", "product"),
        ("ceilings", "copy"),
        ("attention", "attention packed"),
        ("attention", "attention single"),
        ("attention", "attention tiles"),
        ("segments", "segment forward"),
        ("segments", "segment backward"),
        ("head", "head"),
        ("step", "task llm backward"),
        ("step", "task vision forward"),
        ("step", "task llm update"),
        ("step", "step"),
        ("step", "trace"),
    }
    timed = [line for line in lines if "ms" in line]
    assert all(line["ms"] > 0 for line in timed)
    segments = [line for line in lines if line["name"] == "segment backward"]
    assert {line["of"] for line in segments} == {"inner", "last", "encoder"}
    remats = [line["remat"] for line in segments if line["of"] == "inner"]
    assert sorted(remats) == ["dots", "layers", "named", "none", "segment"]
    errors = [e for line in lines[:-1] for e in line.get("errors", ())]
    assert len(errors) == 8  # output and gradients of q, k and v by both kernels
    assert all(0 < e < 0.03 for e in errors)
    (step,) = (line for line in lines if line["name"] == "step")
    assert step["dispatch_ms"] <= step["ms"]
    assert step["tokens_per_s"] == pytest.approx(2 * 32 / step["ms"] * 1e3)


@pytest.mark.parametrize("tokens", [128, 8192])
def test_rows_are_packed(cases, tokens):
    ids, lengths = cases.packed_row(tokens, 100)
    assert ids.shape == (1, tokens)
    assert 0.98 * tokens <= sum(lengths) <= tokens
    np.testing.assert_array_equal(np.bincount(ids[0])[1:], lengths)
    assert (np.diff(ids[0][: sum(lengths)]) >= 0).all()
    assert not ids[0][sum(lengths) :].any()


def test_gaps_between_kernels():
    gaps = module("gpu_engine").gaps
    assert gaps([]) == {}
    found = gaps([(6e6, 10e6), (0.0, 4e6), (1e6, 5e6)])  # two overlap
    assert found == {"ms": 10.0, "idle": 0.1, "longest_gap_ms": 1.0}
