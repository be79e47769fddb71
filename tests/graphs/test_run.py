"""A model and a data class alone: profiled, planned, scheduled, trained, resumed and simulated."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig, Trainer
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.config import CheckpointConfig
from dflop_jax.records import Plan, Profile
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import CHECKPOINTS, read_metrics

pytestmark = pytest.mark.slow  # models that compile quickly train in tests/train


def config(folder, policy="dflop", devices=4, steps=12) -> Config:
    return Config(
        model=ModelConfig(factory="tests.graphs.made_up:build"),
        data=DataConfig(factory="tests.graphs.made_up:make_data", n_samples=64),
        plan=PlanConfig(policy=policy, devices=devices, max_model=1, max_stage=2, buckets=2,
                        max_microbatches=4, effort="quick"),
        # The learning rate stays, so that a shorter run is the beginning of a longer one.
        train=TrainConfig(steps=steps, global_batch=16, learning_rate=1e-3, warmup_steps=0,
                          final_lr_fraction=1.0),
        checkpoint=CheckpointConfig(every=2),
        run_dir=str(folder / policy),
        cache_dir=str(folder / "cache"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(compiled_once, tmp_path_factory):
    jax.devices()  # all 8, before a run asks for 4: other tests of this process need them
    folder = tmp_path_factory.mktemp("made_up")
    result = Trainer(config(folder)).fit()
    return folder, result


def test_it_learns_under_the_planners_choice(run):
    _, result = run
    assert result.steps_done == 12
    assert result.compiles_after_warmup == 0
    assert np.mean(result.losses[-3:]) < np.mean(result.losses[:3])


def test_any_policy_gives_the_same_losses(run):
    folder, result = run
    profile = load(Profile, folder / "dflop/profile.json")
    other = Trainer(config(folder, "orch", devices=2), profile=profile).fit()
    np.testing.assert_allclose(other.losses, result.losses, rtol=2e-4)
    rows = read_metrics(folder / "orch")
    plan = load(Plan, folder / "orch/plan.json")
    assert any(plan.layout.data_ranks(e.source) > 1 for e in plan.layout.edges)
    assert sum(v for r in rows for v in r["moved_in_node"].values()) > 0
    assert not any(v for r in rows for v in r["moved_across_nodes"].values())


def test_a_run_of_it_resumes_bit_for_bit(run):
    """From a copy of it, as if it had been killed after step 8."""
    folder, result = run
    shutil.copytree(folder / "dflop", folder / "cut")
    store = CheckpointStore(folder / "cut" / CHECKPOINTS)
    for step in store.steps():
        if step > 8:
            store.discard(step)
    cut = replace(config(folder), run_dir=str(folder / "cut"))
    assert Trainer(cut, existing="resume").fit().losses == result.losses[8:]
