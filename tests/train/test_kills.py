"""Two kills of `benchmarks/kills.py`: the run goes on as if nothing had happened."""

from pathlib import Path

import pytest

from ..benchmarks.scripts import module
from .many import TWO, Jobs

STEPS = 24


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_run_that_is_killed_twice_has_the_losses_of_one_that_is_not(tmp_path):
    kills = module("kills")
    jobs = Jobs.make(tmp_path, TWO, STEPS, every=2)

    def command(run_dir, *more):
        return jobs.command(2, run_dir, *more)

    # By this seed process 0 while it saves, then process 1 at a step.
    done, runs = kills.campaign(command, tmp_path, n=2, steps=STEPS, kills=2, seed=1)
    assert len(done) == 2
    assert {k.victim for k in done} <= {kills.LAUNCHER, 0, 1}
    assert any(k.rows > 0 for k in done)
    assert kills.table(done, runs, STEPS).row_count >= 2
