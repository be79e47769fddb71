"""Jobs that share cores, by hand; tests of simulated steps check the rest of the engine."""

import pytest

from dflop_jax.simulate.engine import SimJob, run_jobs


@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_jobs_share_cores_equally(n):
    jobs = [SimJob(i, 3.0, devices=2) for i in range(n)]
    for cores in (1.0, 2.0, 3.0, 100.0):
        # Alone a job has min(2, cores) of them, together cores / n.
        want = 3.0 * max(1.0, min(2.0, cores) * n / cores)
        assert run_jobs(jobs, cores)[1] == pytest.approx([want] * n)


def test_transfers_and_computation_do_not_slow_each_other():
    jobs = [
        SimJob("a", 2.0, devices=1),
        SimJob("b", 2.0, devices=1),
        SimJob("link", 3.0),
    ]
    assert run_jobs(jobs, concurrency=1.0)[1] == pytest.approx([4.0, 4.0, 3.0])
    # A job that the transfer brings joins in the middle: from 3 s on three share a core.
    jobs.append(SimJob("c", 2.0, (2,), devices=1))
    assert run_jobs(jobs, concurrency=1.0)[1] == pytest.approx([4.5, 4.5, 3.0, 6.0])


def test_a_cycle_of_jobs_fails():
    with pytest.raises(AssertionError, match="later"):
        run_jobs([SimJob("a", 1.0, (1,)), SimJob("b", 1.0)])
