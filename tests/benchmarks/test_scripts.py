"""Scripts of `benchmarks/` on instances that take seconds."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.data.media_cases import made_dataset

from .scripts import module, run

# ---- gpu_step.py


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
    parts = {"ceilings", "attention", "segments", "head", "policies", "step"}
    assert {part for part, _ in found} == parts
    assert {("attention", "attention tiles"), ("step", "trace")} < found
    assert all(line.get("ms", 1.0) > 0 for line in lines)
    segments = [line for line in lines if line["name"] == "segment backward"]
    assert {line["of"] for line in segments} == {"inner", "last", "encoder"}
    errors = [e for line in lines[:-1] for e in line.get("errors", ())]
    assert len(errors) == 8  # output and gradients of q, k and v by both kernels
    assert all(0 < e < 0.03 for e in errors)
    (step,) = (line for line in lines if line["name"] == "step")
    assert step["tokens_per_s"] == pytest.approx(2 * 32 / step["ms"] * 1e3)


# ---- auto_choice.py


def test_chosen_policies_are_counted_by_overlap():
    auto_choice = module("auto_choice")
    chosen = {"a": ("orch", "orch", "dflop"), "b": ("dip", "orch", "dip")}
    rows = [
        auto_choice.Choice(name, 8, overlap, policy, "p", "none", step_s * (3 - overlap), 1.0)
        for name, step_s in (("a", 1.0), ("b", 7.0))
        for overlap, policy in zip((1.0, 0.5, 0.0), chosen[name], strict=True)
    ]
    assert auto_choice.count_wins(rows) == {
        1.0: ({"orch": 1, "dip": 1}, 1.0),
        0.5: ({"orch": 2}, 1.25),
        0.0: ({"dflop": 1, "dip": 1}, 1.5),
    }


# ---- fuzz_data.py


fuzz_cases, fuzz_data = module("fuzz_cases"), module("fuzz_data")

CASES = 150
FOLDERS = {".png": "images", ".jpg": "images", ".gif": "images", ".mp4": "videos", ".wav": "audio"}


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Media by kind, in folders as those of the shared data."""
    folder = tmp_path_factory.mktemp("media")
    for file in made_dataset(folder / "made").parent.iterdir():
        if kind := FOLDERS.get(file.suffix):
            (folder / kind).mkdir(exist_ok=True)
            shutil.copy(file, folder / kind)
    return folder


@pytest.mark.slow
def test_mutated_files_are_samples_or_named_as_bad(media):
    counts, findings = fuzz_data.run(range(CASES), 1, media, 300)
    assert findings == []
    assert counts.total() == CASES
    results = {r: sum(n for key, n in counts.items() if key.endswith(r)) for r in ("good", "bad")}
    assert sum(results.values()) == CASES
    assert min(results.values()) > CASES / 10
    assert {key.partition(" ")[0] for key in counts} == {w.__name__ for w, _ in fuzz_cases.WAYS}
