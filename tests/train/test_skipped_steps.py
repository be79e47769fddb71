"""Steps whose gradients are not finite, or too large, change nothing, and the run goes on."""

import dataclasses
import json
import math
import statistics
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from dflop_jax import DataConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import step_figures
from dflop_jax.train.optimizer import learning_rates
from dflop_jax.train.step_figures import MIN_NORMS, NORM_WINDOW, SkippedSteps
from tests.report.runs import cells_of

from .resume_cases import CONFIG, STEPS, as_killed, essence, evaluations, fit

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")

BAD = 8  # the step whose loss is scaled beyond all numbers


@pytest.mark.parametrize("n", [0, 1, MIN_NORMS, MIN_NORMS + 1, 2 * NORM_WINDOW + 3])
@pytest.mark.parametrize("skipped", [(), (3, 4, 9)])
def test_limits_follow_the_median_of_the_updates_before_the_last_step(n, skipped):
    norms = np.random.default_rng(n).lognormal(size=n).tolist()
    known = SkippedSteps()
    for step, norm in enumerate(norms):
        known = known.with_step(step, norm, step not in skipped)
    applied = [(k, x) for k, x in enumerate(norms) if k not in skipped][-NORM_WINDOW:]
    before = [x for k, x in applied if k < n - 1]
    want = 8 * statistics.median(before) if len(before) >= MIN_NORMS else math.inf
    assert known.norm_limit(n, 8.0) == want
    assert known.norm_limit(n, 0.0) == math.inf
    assert known.count == sum(k < n for k in skipped)
    # What is decided of a step does not depend on whether the one before it is known.
    last = n and known.with_step(n, 1e9, True).norm_limit(n, 8.0)
    assert last in (0, want) or len(applied) == NORM_WINDOW
    assert msgspec.convert(msgspec.to_builtins(known), SkippedSteps) == known


@pytest.fixture(scope="module")
def scaled(quick):
    """Factors on the losses of steps, for the runs of a test."""
    factors = {}
    run_step = Executor.run_step

    def run(self, schedule, arrays, scales, **kwargs):
        scales = {m: s * factors.get(schedule.step, 1.0) for m, s in scales.items()}
        return run_step(self, schedule, arrays, scales, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "run_step", run)
        yield factors


@pytest.fixture(scope="module")
def overflown(scaled, tmp_path_factory):
    """The folder of a run one of whose steps has gradients that are not finite."""
    folder = tmp_path_factory.mktemp("overflown") / "run"
    scaled[BAD] = 1e39
    fit(folder)
    return folder


def counts_of_updates(folder):
    """What the optimizer counts in the newest checkpoint, by array."""
    store = CheckpointStore(folder / "checkpoints")
    reader = store.open(store.steps()[0])
    names = [n for n in reader.specs if n.endswith("count")]
    assert names
    return {int(reader.read(n, [], [])) for n in names}


def test_a_step_that_is_not_finite_is_left_out_and_named(overflown):
    rows = read_metrics(overflown)
    assert [r["step"] for r in rows if r["skipped"]] == [BAD]
    assert [r["grad_norm"] is None for r in rows] == [r["step"] == BAD for r in rows]
    skipped = rows[BAD]["skipped"]
    assert (skipped["why"], skipped["modules"]) == ("not finite", ["llm", "vision"])
    assert len(skipped["samples"]) == CONFIG.train.global_batch
    assert all(np.isfinite(r["loss"]) for r in rows)
    assert counts_of_updates(overflown) == {STEPS - 1}
    # The rate goes on with the updates.
    rates = learning_rates(CONFIG.train)
    want = [rates[r["step"] - (r["step"] > BAD)] for r in rows]
    np.testing.assert_allclose([r["learning_rate"] for r in rows], want, rtol=1e-6)
    assert cells_of(overflown)["steps that changed no parameter"] == "1"


@pytest.mark.parametrize("saved, rows", [(6, BAD), (9, BAD + 1)])
def test_a_run_that_is_killed_about_such_a_step_goes_on_bit_for_bit(overflown, saved, rows):
    folder = as_killed(overflown, saved=saved, rows=rows)
    fit(folder, "resume")
    assert essence(folder) == essence(overflown)
    assert evaluations(folder) == evaluations(overflown)
    both = [[r["skipped"] for r in read_metrics(f)] for f in (folder, overflown)]
    assert both[0] == both[1]


def test_a_spike_is_left_out_likewise(scaled, tmp_path, monkeypatch):
    monkeypatch.setattr(step_figures, "MIN_NORMS", 3)
    monkeypatch.setitem(scaled, BAD, 1e3)
    fit(tmp_path / "run", train=dataclasses.replace(CONFIG.train, loss_spike=20.0))
    rows = read_metrics(tmp_path / "run")
    assert [r["step"] for r in rows if r["skipped"]] == [BAD]
    assert rows[BAD]["skipped"]["why"] == "spike"
    assert rows[BAD]["skipped"]["modules"] == []
    assert rows[BAD]["grad_norm"] > 100 * rows[BAD - 1]["grad_norm"]
    assert counts_of_updates(tmp_path / "run") == {STEPS - 1}


@pytest.fixture
def poisoned(monkeypatch):
    """Every run begins with a parameter that is no number."""
    init = Executor.init

    def poison(self, *args, **more):
        init(self, *args, **more)
        params = self.state.params["llm"]
        params["exit"] = jax.tree.map(lambda a: a * jnp.nan, params["exit"])

    monkeypatch.setattr(Executor, "init", poison)


def test_many_in_a_row_end_the_run_and_every_row_is_there(quick, poisoned, tmp_path):
    train = dataclasses.replace(CONFIG.train, max_bad_steps=6)
    with pytest.raises(RunFailed, match=r"^step 5 changed .*of llm.*vision .*6 in a row") as error:
        fit(tmp_path / "run", train=train)
    assert "\n" not in str(error.value)
    rows = read_metrics(tmp_path / "run")
    assert [(r["step"], r["loss"]) for r in rows] == [(k, None) for k in range(6)]
    assert [(e["step"], e["loss"]) for e in evaluations(tmp_path / "run")] == [(4, None)]


@pytest.mark.parametrize("weight", [0.01, 0.0])
def test_steps_without_a_supervised_token_are_named_and_runs_refused(weight, capsys):
    answers = [{"value": "Yes.", "weight": weight}, *[{"value": "Yes.", "loss": 0}] * 3]
    records = [
        {
            "id": str(k),
            "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", **answer}],
        }
        for k, answer in enumerate(answers)
    ]
    Path("records.json").write_text(json.dumps(records))
    data = DataConfig(path="records.json", max_tokens=96, workers=1)
    train = dataclasses.replace(CONFIG.train, steps=4, global_batch=1, eval_samples=0, eval_every=0)
    with nullcontext() if weight else pytest.raises(ValueError, match="none of the first 4 sam"):
        fit("run", data=data, train=train)
    tokens = [row["supervised_tokens"] for row in read_metrics("run")]
    assert sorted(tokens) == [0, 0, 0, len("Yes.") + 1 if weight else 0]
    told = capsys.readouterr().err
    assert f"step {tokens.index(0)} has no supervised token" in told
    assert ("3 of 4 steps had no supervised token" in told) == bool(weight)
