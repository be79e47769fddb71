"""Runs on devices whose memory does not hold every plan, or no plan at all."""

import jax
import numpy as np
import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, ScheduleConfig, TrainConfig
from dflop_jax.records import Plan
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.plan_timer import make_executor
from dflop_jax.train.trainer import Trainer

from ..plans import NANO, bucket, nano_profile

CONFIG = Config(
    model=ModelConfig(factory="tests.small:build"),
    data=DataConfig(n_samples=64, max_tiles=2, max_frames=4, max_tokens=96, workers=1),
    plan=PlanConfig(
        policy="dflop", devices=2, max_model=1, buckets=2, sampled_batches=1, max_microbatches=4,
        effort="quick", memory_bytes=1e9,
    ),
    train=TrainConfig(steps=2, global_batch=4),
    schedule=ScheduleConfig(correct=False),
)  # fmt: skip
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    jax.devices()
    monkeypatch.chdir(tmp_path)


def watched(monkeypatch, name, *, fails):
    """Plans that executors run a part with, of which the first so many fail."""
    seen = []
    part = getattr(Executor, name)

    def run(self, *args, **kwargs):
        seen.append(self.plan)
        if len(seen) <= fails:
            raise FULL
        return part(self, *args, **kwargs)

    monkeypatch.setattr(Executor, name, run)
    return seen


@pytest.mark.slow
def test_the_next_plan_is_taken_and_trains_as_if_nothing_had_been(monkeypatch, capsys):
    timed = watched(monkeypatch, "calibrate", fails=1)
    in_a_step = watched(monkeypatch, "rehearse", fails=1)
    began = []

    def first_step(self, *args, **limits):
        if not began:
            began.extend(jax.tree.leaves(jax.tree.map(np.asarray, self.state.params)))
        return run_step(self, *args, **limits)

    run_step = Executor.run_step
    monkeypatch.setattr(Executor, "run_step", first_step)
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)
    trainer = Trainer(CONFIG, profile=nano_profile())
    result = trainer.fit()
    said = capsys.readouterr().err
    assert said.count("dropped: ") == 2
    assert "ran out of it timing its programs" in said
    assert "ran out of it in a step" in said
    assert len(in_a_step) == 2
    plans = [timed[0], *in_a_step]
    assert len({repr(p.layout) for p in plans}) == 3
    taken = load(Plan, result.run_dir / "plan.json")
    assert taken.layout == plans[-1].layout
    assert [r["compiles"] for r in read_metrics(result.run_dir)[1:]] == [0]
    # Parameters begin as they do where no step was tried.
    ex = make_executor(trainer.context, taken)
    ex.init(CONFIG.train.seed)
    for one, other in zip(began, jax.tree.leaves(ex.state.params), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))


@pytest.mark.parametrize("part, what", [("init", "placing its parameters"), ("rehearse", "in a")])
def test_a_given_plan_that_memory_does_not_hold(monkeypatch, part, what):
    watched(monkeypatch, part, fails=1)
    plan = NANO.with_layout(buckets=(bucket(8, 96),))
    with pytest.raises(ValueError, match=rf"^plan dflop: vision .* {what}.*; use a smaller --plan"):
        Trainer(CONFIG, plan=plan, profile=nano_profile()).fit()
