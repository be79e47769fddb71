"""Three kills of `benchmarks/kills.py`: the runs go on as if nothing had happened."""

import importlib.util
import sys
from pathlib import Path

import pytest

from .many import TWO, Jobs

STEPS = 24


@pytest.fixture
def kills():
    """The benchmark as a module."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
    spec = importlib.util.spec_from_file_location("kills", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kills"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_run_that_is_killed_three_times_has_the_losses_of_one_that_is_not(kills, tmp_path):
    jobs = Jobs.make(tmp_path, TWO, STEPS, every=2)

    def command(run_dir, *more):
        return jobs.command(2, run_dir, *more)

    done, runs = kills.campaign(command, tmp_path, n=2, steps=STEPS, kills=3, seed=3)
    assert len(done) == 3
    assert {k.victim for k in done} <= {kills.LAUNCHER, 0, 1}
    assert any(k.rows > 0 for k in done)
    assert kills.table(done, runs, STEPS).row_count >= 2
