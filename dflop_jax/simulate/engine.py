"""Runs jobs that wait for each other and queue at resources.

If every device has cores of its own, the start of a job follows from the ends of the jobs before
it. If devices share cores, computing jobs slow each other down in proportion to the devices they
use. Time then advances from one end of a job to the next. Computing jobs run on a second clock,
which measures work done; only the speed of that clock changes when a job starts or ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SimJob:
    """A job that takes `seconds` if nothing slows it down.

    It starts when all jobs of `waits_for` (with lower numbers) have ended and its resource is free;
    a resource runs its jobs one at a time, in the order of their numbers. `devices` compute
    meanwhile; 0 for a transfer, which computation does not slow down.
    """

    resource: Hashable
    seconds: float
    waits_for: tuple[int, ...] = ()
    devices: int = 0


Times = list[float]  # of each job


def run_jobs(jobs: Sequence[SimJob], concurrency: float = math.inf) -> tuple[Times, Times]:
    """(start, end) of each job, in seconds; `concurrency` devices compute at the same time."""
    devices: dict[Hashable, int] = {}
    for job in jobs:
        devices[job.resource] = max(devices.get(job.resource, 0), job.devices)
    if sum(devices.values()) > concurrency:
        return _run_shared(jobs, concurrency)
    start_s, end_s = [0.0] * len(jobs), [0.0] * len(jobs)
    free_s: dict[Hashable, float] = {}  # when each resource's last job ends
    for i, job in enumerate(jobs):
        job_start_s = free_s.get(job.resource, 0.0)
        for input_job in job.waits_for:
            assert input_job < i, "a job waits for a later one"
            if end_s[input_job] > job_start_s:
                job_start_s = end_s[input_job]
        start_s[i] = job_start_s
        free_s[job.resource] = end_s[i] = job_start_s + job.seconds
    return start_s, end_s


def _run_shared(jobs: Sequence[SimJob], concurrency: float) -> tuple[Times, Times]:
    """`run_jobs` for computing jobs that slow each other down."""
    n_pending = [0] * len(jobs)  # ends that a job still waits for, its resource's turn among them
    followers: list[list[int]] = [[] for _ in jobs]
    last: dict[Hashable, int] = {}
    for i, job in enumerate(jobs):
        input_jobs = {*job.waits_for, *([last[job.resource]] if job.resource in last else [])}
        assert all(0 <= d < i for d in input_jobs), "a job waits for a later one"
        n_pending[i] = len(input_jobs)
        for d in input_jobs:
            followers[d].append(i)
        last[job.resource] = i
    start_s, end_s = [0.0] * len(jobs), [0.0] * len(jobs)
    wall_ends: list[tuple[float, int]] = []  # (end, job) by the clock on the wall
    work_ends: list[tuple[float, int]] = []  # (end, job) by the clock of work done
    wall_s, work_s, computing = 0.0, 0.0, 0
    ready_jobs = [i for i, n in enumerate(n_pending) if n == 0]
    while ready_jobs or wall_ends or work_ends:
        for i in ready_jobs:
            job, start_s[i] = jobs[i], wall_s
            if job.devices:
                computing += job.devices
                alone = min(1.0, concurrency / job.devices)
                heapq.heappush(work_ends, (work_s + job.seconds * alone, i))
            else:
                heapq.heappush(wall_ends, (wall_s + job.seconds, i))
        speed = min(1.0, concurrency / computing) if computing else 1.0
        next_s = wall_s + max(0.0, work_ends[0][0] - work_s) / speed if work_ends else math.inf
        shared_next = bool(work_ends) and (not wall_ends or next_s <= wall_ends[0][0])
        if shared_next:
            wall_s, work_s = next_s, work_ends[0][0]
        else:
            work_s += (wall_ends[0][0] - wall_s) * speed
            wall_s = wall_ends[0][0]
        ended: list[int] = []
        while wall_ends and wall_ends[0][0] <= wall_s:
            ended.append(heapq.heappop(wall_ends)[1])
        while shared_next and work_ends and work_ends[0][0] <= work_s:
            ended.append(heapq.heappop(work_ends)[1])
            computing -= jobs[ended[-1]].devices
        ready_jobs = []
        for i in ended:
            end_s[i] = wall_s
            for f in followers[i]:
                n_pending[f] -= 1
                if n_pending[f] == 0:
                    ready_jobs.append(f)
        ready_jobs.sort()
    assert not any(n_pending), "jobs wait for each other"
    return start_s, end_s
