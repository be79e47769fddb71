"""`benchmarks/memory.py`: its cases, and some of them within the target."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_two_cases_at_full_size(tmp_path):
    names = (
        "SigLIP-400M[0:26] 1x1x1 8x729 forward",
        "Qwen2.5-7B[0:28] 1x1x4 1x4096 forward",
    )
    out = run("--only", *names, "--json", tmp_path / "out.json")
    assert out.returncode == 0, out.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["worst_abs_error"] <= found["target"] == 0.05
    rows = {r["case"]: r for r in found["rows"]}
    assert tuple(rows) == names
    # 7.6 billion float32 parameters over 4 devices: 28 layers, embedding and head.
    width, kv, mlp, vocab = 3584, 512, 18944, 152064
    layer = 2 * width * (width + kv) + 3 * width * mlp
    held = 4 * (28 * layer + 2 * vocab * width) / 4 / 2**30
    qwen = rows[names[1]]
    assert qwen["compiled_gib"] - qwen["temporaries_gib"] == pytest.approx(held, rel=0.02)
    assert "2 depths" in out.stdout


def test_there_are_twenty_cases_of_five_models():
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert len({c.name for c in module.CASES}) == len(module.CASES) == 20
    assert {c.model for c in module.CASES} == set(module.MODULES)
    assert {c.mesh[2] for c in module.CASES} == {1, 2, 4}
    assert {c.mesh[0] for c in module.CASES} == {1, 2}


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("--only", "GPT-5"), "'GPT-5' is in no name"),
        (("--json", "/nowhere/out.json"), "no such folder"),
    ],
)
def test_bad_arguments(arguments, why):
    out = run(*arguments)
    assert out.returncode == 2
    assert why in out.stderr
    assert "Traceback" not in out.stderr
