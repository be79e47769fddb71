"""`benchmarks/two_process.py`: a row in one process, and what is shown of all of them.

All rows train for minutes, in two processes: the row here is a blind one on a small model.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop_jax.config import DataConfig, ModelConfig
from dflop_jax.records import Predicted
from dflop_jax.report.run_folder import read_metrics

from ..plans import nano_profile
from ..train.many import TWO
from .scripts import module, refusal

two, runs = module("two_process"), module("two_process_runs")
STEPS = runs.WARMUP + 1


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def small(config):
    """The configuration of a row, on a model that compiles in seconds; its plan has 2 devices."""

    def made(self, name):
        data = DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96)
        plan = replace(config(self, name).plan, devices=2)
        model = ModelConfig(factory="tests.small:build")
        return replace(config(self, name), model=model, data=data, plan=plan)

    return made


@pytest.mark.slow
def test_a_row_is_trained_by_the_plan_that_it_names(monkeypatch):
    monkeypatch.setattr(runs.Options, "config", small(runs.Options.config))
    bench = runs.Bench(runs.Options(STEPS, 4, "nano"))
    bench.planned, bench.profile = (lambda like: TWO), nano_profile()
    row = bench.train("blind data").row
    assert bench.trained["blind data"].plan.layout.submeshes == TWO.layout.submeshes
    assert row["efficiency"] > 0
    assert row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1]
    assert len(row["losses"]) == 1
    assert len(read_metrics(runs.run_folder("blind data"))) == STEPS


def test_what_was_timed_of_a_plan_that_then_changed_is_found():
    """A finalist's lookahead and work are chosen after its programs were timed."""
    timings = runs.Timings(nano_profile())
    first, other = (
        SimpleNamespace(executor=SimpleNamespace(plan=p)) for p in (TWO, TWO.with_layout(fan_in=2))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.plan_trials, "compile_and_time", lambda place, ex, **_: ex)
        with timings.taken():
            for timed in (first, other):
                runs.trainer.compile_and_time(None, timed)
    changed = replace(TWO, predicted=Predicted(1.0)).with_scheduling(lookahead=3, work_budget=9)
    assert timings.of(changed) is first


def row(step_s, predicted_s=1.0):
    return {"plan": "vision@0 1x1x1", "predicted_s": predicted_s, "step_s": step_s,
            "spread_s": [step_s, step_s], "scheduled_s": step_s, "padding": {"llm": 0.1},
            "efficiency": 0.5, "losses": [1.0]}  # fmt: skip


def test_rows_are_trained_shown_and_written(monkeypatch, capsys):
    """The two processes are made up; they fail in the last row, and what was made is there."""
    names = runs.ROWS[:-1]

    def launch(command, n, **_):
        assert (n, command[command.index("--worker") + 1]) == (2, "rows.json")
        # Two stages cannot share the three layers of the usual model's LLM.
        assert command[command.index("--rows") + 1 :] == [r for r in runs.ROWS if r != runs.LOOP]
        made = {}
        for name in names:
            made[name] = row(1.0, 0.5 if name == "dip" else 1.0)
            two.write_json(Path("rows.json"), two.result(made))
            figures = json.loads(Path("rows.json").read_text())
            assert figures["rows"].keys() == made.keys()
        return SimpleNamespace(exit_code=1)

    monkeypatch.setattr(two, "launch", launch)
    monkeypatch.setattr(two, "read_runs", lambda folders: folders)
    monkeypatch.setattr(two, "compare", lambda runs, picture: None)
    monkeypatch.setattr(sys, "argv", ["two_process", "--json", "rows.json"])
    assert two.main() == 1
    figures = json.loads(Path("rows.json").read_text())
    assert figures["policies"].keys() == {*runs.POLICIES, "auto"}
    assert "the planner chooses dip" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bad", [("--steps", "4"), ("--rows", "moon"), ("--rows", "loop"), ("--json", "/nowhere/a")]
)
def test_bad_arguments(bad):
    assert bad[0] in refusal("two_process", *bad)
