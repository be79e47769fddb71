"""Runs jobs that wait for each other and queue at resources.

Where every device has its own cores, each job's start is read off the ends of those before it.
Where devices share cores, computing jobs slow each other down in proportion to the devices they
use. Time then moves from one end of a job to the next, in as many turns as there are distinct ends;
these jobs run on a second clock that stands for work done, and only that clock's speed changes when
one begins or ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Something that takes `seconds` when nothing slows it down.

    It begins when all jobs of `waits_for` (smaller numbers than its own) have ended and its
    resource, which runs its jobs one at a time in the order of their numbers, is free. `devices`
    compute meanwhile; 0 for a transfer, which no computation slows down.
    """

    resource: Hashable
    seconds: float
    waits_for: tuple[int, ...] = ()
    devices: int = 0


Times = list[float]  # of each job


def run(jobs: Sequence[Job], concurrency: float = math.inf) -> tuple[Times, Times]:
    """When each job begins and when it ends, in seconds; `concurrency` devices really compute at
    once."""
    devices: dict[Hashable, int] = {}
    for job in jobs:
        devices[job.resource] = max(devices.get(job.resource, 0), job.devices)
    if sum(devices.values()) > concurrency:
        return _on_shared_cores(jobs, concurrency)
    start_s, end_s = [0.0] * len(jobs), [0.0] * len(jobs)
    free_s: dict[Hashable, float] = {}  # when each resource's last job ends
    for i, job in enumerate(jobs):
        begin_s = free_s.get(job.resource, 0.0)
        for before in job.waits_for:
            assert before < i, "a job waits for a later one"
            if end_s[before] > begin_s:
                begin_s = end_s[before]
        start_s[i] = begin_s
        free_s[job.resource] = end_s[i] = begin_s + job.seconds
    return start_s, end_s


def _on_shared_cores(jobs: Sequence[Job], concurrency: float) -> tuple[Times, Times]:
    """The same where jobs that compute may slow each other down."""
    blocked = [0] * len(jobs)  # ends that a job still waits for, its resource's turn among them
    followers: list[list[int]] = [[] for _ in jobs]
    last: dict[Hashable, int] = {}
    for i, job in enumerate(jobs):
        before = {*job.waits_for, *([last[job.resource]] if job.resource in last else [])}
        assert all(0 <= d < i for d in before), "a job waits for a later one"
        blocked[i] = len(before)
        for d in before:
            followers[d].append(i)
        last[job.resource] = i
    start_s, end_s = [0.0] * len(jobs), [0.0] * len(jobs)
    wall: list[tuple[float, int]] = []  # (end, job) by the clock on the wall
    work: list[tuple[float, int]] = []  # (end, job) by the clock of work done
    now, done, computing = 0.0, 0.0, 0
    ready = [i for i, n in enumerate(blocked) if n == 0]
    while ready or wall or work:
        for i in ready:
            job, start_s[i] = jobs[i], now
            if job.devices:
                computing += job.devices
                alone = min(1.0, concurrency / job.devices)
                heapq.heappush(work, (done + job.seconds * alone, i))
            else:
                heapq.heappush(wall, (now + job.seconds, i))
        speed = min(1.0, concurrency / computing) if computing else 1.0
        then = now + max(0.0, work[0][0] - done) / speed if work else math.inf
        shared_next = bool(work) and (not wall or then <= wall[0][0])
        if shared_next:
            now, done = then, work[0][0]
        else:
            done += (wall[0][0] - now) * speed
            now = wall[0][0]
        ended: list[int] = []
        while wall and wall[0][0] <= now:
            ended.append(heapq.heappop(wall)[1])
        while shared_next and work and work[0][0] <= done:
            ended.append(heapq.heappop(work)[1])
            computing -= jobs[ended[-1]].devices
        ready = []
        for i in ended:
            end_s[i] = now
            for f in followers[i]:
                blocked[f] -= 1
                if blocked[f] == 0:
                    ready.append(f)
        ready.sort()
    assert not any(blocked), "jobs wait for each other"
    return start_s, end_s
