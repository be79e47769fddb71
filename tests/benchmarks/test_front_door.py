"""`benchmarks/front_door.py` with one family, in this process and with a given plan: what a folder
of transformers and a data file train is what transformers computes."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.record_files import save
from dflop_jax.records import Bucket, Layout, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.verify import reference
from models import qwen3_vl
from tests.benchmarks.scripts import module
from tests.plans import nano_profile

script = module("front_door")


@pytest.mark.slow
@pytest.mark.skipif(bool(reference.missing()), reason=reference.missing())
def test_the_loss_is_that_of_transformers(tmp_path, monkeypatch, capsys):
    jax.devices()  # started with conftest's 8
    monkeypatch.chdir(tmp_path)
    profile = nano_profile()
    monkeypatch.setattr(script, "MORE_STEPS", 2)
    monkeypatch.setattr(script, "killed", lambda *words, folder, run: 3)  # see tests/train

    def in_process(*words, folder):
        monkeypatch.chdir(folder)
        words = [str(w) for w in words]
        if words[0] == "verify":  # see tests/verify
            said = {"bit_identical": True, "max_logit_error": 0.0, "not_compared": ""}
            return subprocess.CompletedProcess(words, 0, json.dumps(said), ""), 0.0, 0.0
        if words[0] == "generate":  # see tests/generate
            return subprocess.CompletedProcess(words, 0, '{"tokens": []}', ""), 0.0, 0.0
        if words[0] == "train":
            model = qwen3_vl.build(words[words.index("--model") + 1])
            layers = {m: it.n_layers for m, it in model.modules.items()}
            plan = Plan(
                "dflop",
                Layout(
                    (SubmeshPlan("vision", 0, 1, 1, 1), SubmeshPlan("llm", 1, 1, 1, 1)),
                    tuple(SegmentPlan(m, m, 0, n, m, True, True) for m, n in layers.items()),
                    (Bucket.of({"vision": Shape(2, 512), "llm": Shape(2, 256)}),),
                    edges=edges_of(model),
                ),
            )
            facts = replace(
                profile.model, n_layers=layers, piece_tokens={}, edges=plan.layout.edges
            )
            save(plan, "plan.json")
            save(replace(profile, model=facts), "profile.json")
            words += ["--plan-file", "plan.json", "--profile-file", "profile.json"]
            if "--resume" not in words:
                dry(words, capsys)
        code = main(words)
        out, err = capsys.readouterr()
        assert code == 0, err
        return subprocess.CompletedProcess(words, code, out, err), 0.0, 0.0

    monkeypatch.setattr(script, "dflop", in_process)
    script.main(["--families", "qwen3_vl", "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads(Path(tmp_path / "rows.json").read_text())
    assert row["steps"] == 3
    assert row["error"] <= 1e-4
    assert (row["resumed_steps"], row["same_folder"]) == (5, True)
    assert row["exported_loss"] < row["transformers_loss"]  # five small steps from there


def dry(words, capsys):
    """The same command with --dry-run, in a folder of its own: it says what to expect and trains
    nothing, so that a run may begin there."""
    assert main([*words, "--dry-run", "--run_dir", "dry"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["steps_done"] == 0
    order = ["model.factory", "devices: 2 x cpu", "data: ", "plan dflop", "expected: "]
    places = [err.index(said) for said in order]
    assert places == sorted(places)
    assert re.search(r"a step, 3 steps in [\d.]+ (s|min)", err)
    assert not Path("dry").exists()
