"""`benchmarks/two_process.py`: rows in one process, and what is shown of all of them.

All rows train for minutes, in two processes: the row here is the one whose tasks are put in another
order, by prices that the run measures itself.
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
def test_tasks_are_ordered_by_the_prices_that_a_run_measures(monkeypatch, capsys):
    orders = []
    order_tasks = runs.order_tasks

    def noted(plan, graph, groups, seconds):
        orders.append(order_tasks(plan, graph, groups, seconds))
        assert sum(map(seconds, orders[-1])) > 0
        return orders[-1]

    monkeypatch.setattr(runs, "order_tasks", noted)
    monkeypatch.setattr(runs.Options, "config", small(runs.Options.config))
    bench = runs.Bench(runs.Options(STEPS, 4, "nano"))
    bench.planned, bench.profile = (lambda like: TWO), (lambda like: nano_profile())
    rows = {}
    for name in ("priced order", "textbook order"):
        rows[name] = bench.train(name).row
    assert len(orders) == STEPS
    bench.compare_rates()  # which needs a policy's row
    assert bench.trained["priced order"].plan.layout.submeshes == TWO.layout.submeshes
    for row in rows.values():
        assert row["efficiency"] > 0
        assert row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1]
    # Of one model on the same batches, whatever the order.
    assert rows["priced order"]["losses"] == pytest.approx(rows["textbook order"]["losses"])
    assert len(read_metrics(runs.run_folder("priced order"))) == STEPS


def test_what_was_timed_of_a_plan_that_then_changed_is_found():
    """A finalist's lookahead and work are chosen after its programs were timed."""
    timings = runs.Timings(nano_profile())
    first, other = (
        SimpleNamespace(executor=SimpleNamespace(plan=p)) for p in (TWO, TWO.with_layout(fan_in=2))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.timing, "compile_and_time", lambda place, ex, **_: ex)
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
            made[name] = row(2.0 if name == "awaited" else 1.0, 0.5 if name == "dip" else 1.0)
            two.write_json(Path("rows.json"), two.result(made))
            figures = json.loads(Path("rows.json").read_text())
            assert figures["rows"].keys() == made.keys()
        return SimpleNamespace(exit_code=1)

    monkeypatch.setattr(two, "launch", launch)
    monkeypatch.setattr(two, "compare", lambda folders, picture: None)
    monkeypatch.setattr(sys, "argv", ["two_process", "--json", "rows.json"])
    assert two.main() == 1
    figures = json.loads(Path("rows.json").read_text())
    assert figures["policies"].keys() == {*runs.POLICIES, "auto"}
    assert figures["orders"].keys() == {"textbook", "priced"}
    assert figures["async_over_awaited"] == 2.0
    assert "kept_over_recomputed" not in figures
    said = capsys.readouterr().out
    assert "the planner chooses dip" in said
    assert "asynchronous over awaited dispatch (dflop): 2.00 x" in said


@pytest.mark.parametrize(
    "bad", [("--steps", "4"), ("--rows", "moon"), ("--rows", "loop"), ("--json", "/nowhere/a")]
)
def test_bad_arguments(bad):
    assert bad[0] in refusal("two_process", *bad)
