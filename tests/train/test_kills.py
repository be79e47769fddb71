"""A run that is killed at random steps and restarted has the losses of one that is not."""

import random
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.records import SubmeshPlan
from dflop_jax.report.run_folder import CHECKPOINTS, read_metrics
from dflop_jax.report.wall_time import STOPPED, read_wall_time
from dflop_jax.runtime.executor import Executor
from dflop_jax.train.trainer import Trainer

from ..benchmarks.scripts import module
from ..plans import NANO, bucket, nano_profile
from .many import Jobs, losses

STEPS, OVERFLOWS = 24, 12
ON_BOTH = replace(NANO, policy="orch").with_layout(
    buckets=(bucket(4, 96),),
    submeshes=tuple(SubmeshPlan(m, 0, 1, 2, 1) for m in ("vision", "llm")),
    segments=tuple(replace(s, zero=3) for s in NANO.layout.segments),
)
ALONE = NANO.with_layout(
    buckets=(bucket(8, 160),),
    submeshes=tuple(SubmeshPlan(m, 0, 1, 1, 1) for m in ("vision", "llm")),
)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_run_that_is_killed_twice_has_the_losses_of_one_that_is_not(tmp_path, monkeypatch):
    kills = module("kills")
    jobs = Jobs.make(tmp_path, ON_BOTH, STEPS, every=2, overflows=OVERFLOWS)
    as_killed = tmp_path / "as_killed"

    def command(run_dir, *more):
        # What holds for the first start only: at a restart nothing is overwritten.
        train = jobs.command(2, run_dir, "--overwrite", *more)
        first = train.index("launch") + 1
        return [*train[:first], "--max-restarts", "3", *train[first:]]

    expected = kills.undisturbed(command, tmp_path / "undisturbed")
    wanted, rng = ["SIGKILL", "SIGSEGV"], random.Random()
    code, done = kills.killed_run(command, tmp_path / "killed", wanted, 0.1, rng)
    said = (tmp_path / "killed.log").read_text()
    assert code == 0, said
    assert len(done) >= 1
    assert all(k.survived and not k.left_behind for k in done)
    assert kills.losses(tmp_path / "killed") == expected
    assert f"process {done[0].rank} was killed by SIGKILL; ending the others" in said
    assert "restart 1 of 3" in said
    assert kills.table(done, len(done)).row_count == len(done)

    # What its time went to is known of all starts together.
    spent = read_wall_time(tmp_path / "killed")
    assert spent.starts == 1 + said.count("restart ")
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s)
    assert spent.seconds[STOPPED] > 0

    # A step whose gradients are not finite changes nothing, on both processes alike.
    rows = read_metrics(tmp_path / "undisturbed")
    assert [r["step"] for r in rows if r["skipped"]] == [OVERFLOWS]
    assert all(np.isfinite(r["loss"]) for r in rows)

    shutil.copytree(tmp_path / "undisturbed", as_killed)
    store = CheckpointStore(as_killed / CHECKPOINTS)
    for step in store.steps():
        if step > OVERFLOWS:
            store.discard(step)
    assert {s.zero for s in ALONE.layout.segments} == {1}
    monkeypatch.setattr(Executor, "run_step", Executor.run_step)  # which the experiment replaces
    config = replace(runpy.run_path(tmp_path / "small.py")["config"](), run_dir=str(as_killed))
    resumed = Trainer(config, plan=ALONE, profile=nano_profile(), existing="resume").fit()
    assert 0 < len(resumed.losses) < STEPS
    np.testing.assert_allclose(losses(as_killed), losses(tmp_path / "undisturbed"), rtol=1e-5)
