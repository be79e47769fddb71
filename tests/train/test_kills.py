"""Two faults of `benchmarks/kills.py`: the launcher starts the run again, which goes on as if
nothing had been done to it, or on one process under another ZeRO degree."""

import json
import random
import runpy
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.records import SubmeshPlan
from dflop_jax.report.run_folder import CHECKPOINTS, RESTARTS, read_metrics
from dflop_jax.report.spent import STOPPED, read_spent
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
def test_a_run_that_is_killed_twice_has_the_losses_of_one_that_is_not(tmp_path):
    kills = module("kills")
    jobs = Jobs.make(tmp_path, ON_BOTH, STEPS, every=2, overflows=OVERFLOWS)
    as_killed = tmp_path / "as_killed"

    def command(run_dir, *more):
        # What holds for the first start only: at a restart nothing is overwritten.
        train = jobs.command(2, run_dir, "--overwrite", *more)
        first = train.index("launch") + 1
        return [*train[:first], "--max-restarts", "9", *train[first:]]

    def run_of(run_dir):
        # fmt: off
        return kills.DisturbedRun(command, run_dir, n=2, steps=STEPS, cache=tmp_path / "no cache",
                                  rng=random.Random(0), limit_s=300.0)
        # fmt: on

    wanted, told = [("SIGKILL", "save"), ("segfault", "step")], []
    how = {"mtbf_s": 0.0, "limit_s": 300.0, "rng": random.Random(0), "tell": told.append}
    done = kills.campaign(command, tmp_path, wanted, run_of, **how)
    assert [len(d.faults) for d in told][:1] == [1]  # written as it goes
    assert told[-1] == done
    assert [f.kind for f in done.faults] == ["SIGKILL", "segfault"]
    assert all(f.survived and f.restarted and not f.unexpected for f in done.faults)
    assert (done.exact, done.exact_faults, done.orphans) == (done.runs, 2, 0)
    assert done.skips == done.runs  # the step that is not finite, in each of them
    assert 0 < done.goodput < 1
    assert kills.table(done).row_count == 2
    summary = kills.summary(done)
    assert summary["survived"] == summary["bit_exact"] == summary["faults"] == 2 + done.runs
    runs = done.runs
    counted = tmp_path / f"disturbed{runs - 1}" / RESTARTS
    *restarts, last = map(json.loads, counted.read_text().splitlines())
    assert {r["exit_code"] - 128 for r in restarts} <= {signal.SIGKILL, signal.SIGSEGV}
    assert last["is_last"]
    assert "resumed after step" in counted.parent.with_suffix(".log").read_text()

    # What its time went to is known of all starts together.
    spent = [read_spent(tmp_path / f"disturbed{i}") for i in range(runs)]
    assert sum(s.starts for s in spent) > runs
    for s in spent:
        assert sum(s.seconds.values()) == pytest.approx(s.wall_s)
    assert sum(s.seconds.get(STOPPED, 0.0) for s in spent) > 0

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
    config = replace(runpy.run_path(tmp_path / "small.py")["config"](), run_dir=str(as_killed))
    resumed = Trainer(config, plan=ALONE, profile=nano_profile(), existing="resume").fit()
    assert 0 < len(resumed.losses) < STEPS
    np.testing.assert_allclose(losses(as_killed), losses(tmp_path / "undisturbed"), rtol=1e-5)
