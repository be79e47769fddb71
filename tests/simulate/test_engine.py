"""The event loop against the longest path over its edges, found by relaxing them all."""

import itertools
import math

import numpy as np
import pytest

from dflop_jax.simulate.engine import SimJob, _run_shared, run_jobs


def longest_paths(jobs):
    """(start, end) of every job with cores for all: Bellman-Ford over waits and resource turns."""
    edges = [(d, i) for i, job in enumerate(jobs) for d in job.waits_for]
    for resource in {job.resource for job in jobs}:
        mine = [i for i, job in enumerate(jobs) if job.resource == resource]
        edges += itertools.pairwise(mine)
    start = [0.0] * len(jobs)
    for _ in jobs:
        for a, b in edges:
            start[b] = max(start[b], start[a] + jobs[a].seconds)
    return start, [s + job.seconds for s, job in zip(start, jobs)]


def random_jobs(rng, n):
    return [
        SimJob(
            resource=int(rng.integers(0, 4)),
            seconds=float(rng.exponential()) * (rng.random() < 0.8),
            waits_for=tuple(
                sorted({int(d) for d in rng.integers(0, i, rng.integers(0, 4))} if i else ())
            ),
            devices=int(rng.integers(0, 3)),
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 30])
def test_ends_are_the_longest_paths(n):
    rng = np.random.default_rng(n)
    for _ in range(60):
        jobs = random_jobs(rng, n)
        start, end = longest_paths(jobs)
        assert run_jobs(jobs) == (start, end)  # to the last bit: the same additions
        assert _run_shared(jobs, math.inf)[1] == pytest.approx(end)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_jobs_share_the_cores_equally(n):
    jobs = [SimJob(i, 3.0, devices=2) for i in range(n)]
    for cores in (1.0, 2.0, 3.0, 100.0):
        # Alone a job has min(2, cores) of them, together cores / n.
        want = 3.0 * max(1.0, min(2.0, cores) * n / cores)
        assert run_jobs(jobs, cores)[1] == pytest.approx([want] * n)


def test_transfers_neither_slow_nor_are_slowed():
    jobs = [
        SimJob("a", 2.0, devices=1),
        SimJob("b", 2.0, devices=1),
        SimJob("link", 3.0),
    ]
    assert run_jobs(jobs, concurrency=1.0)[1] == pytest.approx([4.0, 4.0, 3.0])
    # A job that the transfer brings joins in the middle: from 3 s on three share a core.
    jobs.append(SimJob("c", 2.0, (2,), devices=1))
    assert run_jobs(jobs, concurrency=1.0)[1] == pytest.approx([4.5, 4.5, 3.0, 6.0])


def test_a_cycle_is_our_own_mistake():
    with pytest.raises(AssertionError, match="later"):
        run_jobs([SimJob("a", 1.0, (1,)), SimJob("b", 1.0)])
