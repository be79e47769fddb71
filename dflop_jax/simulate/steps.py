"""Simulator of a plan's steps: the runtime's task lists with durations instead of programs.

A resource runs its tasks in list order; a task starts when its inputs have arrived and its resource
is free. Sends overlap with computation: each pair of submeshes has one link per direction, which
carries one send at a time, in dispatch order.

If devices do not share cores, a job (a task or a send) starts at the maximum end time of the jobs
that it waits for. If devices share cores (`concurrency` below the device count), computing jobs
slow each other down in proportion to the devices they use. Time then advances from one end of a job
to the next. Computing jobs run on a second clock, which measures work done; when a job starts or
ends, only the speed of that clock changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    RETURN,
    SEND,
    Event,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    SendId,
    Shape,
    Task,
    Trace,
)
from dflop_jax.simulate.numbered_tasks import Sends, add_sends, run_in_order
from dflop_jax.simulate.task_graph import StepGraph, segment_links, segment_resources, step_graph
from dflop_jax.simulate.task_order import list_schedules, schedule_order

_DISPATCH = "dispatch"  # the resource of the thread that dispatches tasks
_ROUNDING = 1e-9  # makespans with a smaller relative difference count as equal


@dataclass(frozen=True)
class Noise:
    """Random deviations of durations from predictions: every task and send gets a log-normal
    factor of mean 1, drawn from (seed, step); `sigma` is the standard deviation of its logarithm.
    `stragglers`: additional factors for tasks of the named submeshes."""

    seed: int = 0
    sigma: float = 0.0
    stragglers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        factors = [*self.stragglers.values()]
        good = all(0 < f < math.inf for f in factors) and 0 <= self.sigma < math.inf
        if not good or self.seed < 0:
            raise ValueError(
                f"noise needs seed >= 0, sigma >= 0 and straggler factors above 0, got {self}"
            )


def simulate_step(
    plan: Plan,
    schedule: Schedule,
    prices: Prices,
    trainable: Collection[str],
    *,
    noise: Noise | None = None,
    synchronous: Collection[str] = (),
) -> Trace:
    """Simulate one step and return its trace; ValueError if the schedule's order is invalid.

    Sends of a segment to another submesh are SEND events of that segment and group; gradients sent
    back to it are RETURN events. Their submesh is named "from → to".

    Args:
      synchronous: submeshes whose tasks are dispatched only after the previous task on the same
        devices has ended. One thread dispatches all tasks in order, so later tasks wait, too.
    """
    submeshes = [m.name for m in plan.layout.submeshes]
    if noise and (unknown := [m for m in noise.stragglers if m not in submeshes]):
        raise ValueError(
            f"straggler {unknown[0]!r} is not a submesh of the plan; it has {', '.join(submeshes)}"
        )
    graph = step_graph(plan.layout, schedule.groups, trainable)
    order = schedule_order(plan, schedule, graph)
    return simulate_order(plan.layout, schedule, graph, order, prices, noise, synchronous)


def simulate_order(
    layout: Layout,
    schedule: Schedule,
    graph: StepGraph,
    order: Sequence[Task],
    prices: Prices,
    noise: Noise | None = None,
    synchronous: Collection[str] = (),
) -> Trace:
    """Return `simulate_step` for an order that is known to be valid for the graph."""
    submesh, resource = {s.name: s.submesh for s in layout.segments}, segment_resources(layout)
    n_devices = {m.name: m.n_devices for m in layout.submeshes}
    slowdown = noise.stragglers if noise else {}
    seconds, sends = task_seconds(schedule, prices), task_sends(layout, schedule, graph, prices)
    factors = _noise_factors(len(order), noise, schedule.step, 0)
    send_factors = _noise_factors(sum(map(len, sends.values())), noise, schedule.step, 1)
    jobs: list[SimJob] = []
    trace_rows: list[tuple[str, str, int, str] | None] = []  # event of each job; None: no event
    last_job: dict[int, int] = {}  # by resource
    dispatch_wait: tuple[int, ...] = ()  # the last job in which the dispatching thread waits
    sent: dict[tuple[Task, Task], int] = {}  # (producer, reader) -> the send's job
    job_of: dict[Task, int] = {}
    for task, factor in zip(order, factors):
        mesh, resource_id = submesh[task.segment], resource[task.segment]
        waits = [sent[t, task] if (t, task) in sent else job_of[t] for t in graph.waits_for[task]]
        if mesh in synchronous and resource_id in last_job:
            dispatch_wait, ended = (len(jobs),), last_job[resource_id]
            jobs.append(SimJob(_DISPATCH, 0.0, (ended,)))
            trace_rows.append(None)
        job_of[task] = last_job[resource_id] = len(jobs)
        alone_s = seconds(task) * factor * slowdown.get(mesh, 1.0)
        jobs.append(SimJob(resource_id, alone_s, (*waits, *dispatch_wait), n_devices[mesh]))
        trace_rows.append((mesh, task.segment, task.group, task.direction))
        for reader, (link, send_s) in sends.get(task, {}).items():
            sent[task, reader] = len(jobs)
            jobs.append(SimJob(link, send_s * next(send_factors), (job_of[task],)))
            source, kind = (reader, RETURN) if task.direction == BACKWARD else (task, SEND)
            link_name = f"{mesh} → {submesh[reader.segment]}"
            trace_rows.append((link_name, source.segment, source.group, kind))
    events = tuple(
        Event(*row, start, end)
        for row, start, end in zip(trace_rows, *run_jobs(jobs, prices.concurrency))
        if row is not None
    )
    return Trace(schedule.step, "simulated", events)


def task_seconds(schedule: Schedule, prices: Prices) -> Callable[[Task], float]:
    """Return a function that gives a task's seconds when it runs alone; 0 without a price."""
    first_group: dict[tuple[Shape, tuple[str, ...]], int] = {}
    kinds = [(g.shape, g.remat_less) for g in schedule.groups]
    same_program = [first_group.setdefault(kind, i) for i, kind in enumerate(kinds)]
    programs: dict[tuple[str, int, str], Price | None] = {}

    def seconds(task: Task) -> float:
        if task.group == NO_GROUP:
            return prices.step_end.get(task, 0.0)
        key = task.segment, same_program[task.group], task.direction
        group = schedule.groups[task.group]
        if key not in programs:
            programs[key] = prices.programs.get(ProgramId.for_task(task, group))
        price = programs[key]
        return price.seconds(group.content) if price else 0.0

    return seconds


def task_sends(layout: Layout, schedule: Schedule, graph: StepGraph, prices: Prices) -> Sends:
    """Return each task's sends to other submeshes: task -> reader -> ((submesh, submesh), seconds).
    The group that reads the activations determines the size of a send."""
    submesh = {s.name: s.submesh for s in layout.segments}
    linked = [(k.source, k.target) for k in segment_links(layout)]
    crossing = {(a, b) for a, b in linked if submesh[a] != submesh[b]}
    first_group: dict[Shape, int] = {}
    shapes = [first_group.setdefault(g.shape, i) for i, g in enumerate(schedule.groups)]
    send_seconds: dict[tuple[str, str, int, str], float] = {}
    sends: dict[Task, dict[Task, tuple[object, float]]] = {}
    for reader in graph.tasks if crossing and prices.sends else ():
        for producer in graph.waits_for[reader]:
            if producer.direction not in (FORWARD, BACKWARD):
                continue
            backward = producer.direction == BACKWARD
            source, target = (reader, producer) if backward else (producer, reader)
            if (source.segment, target.segment) not in crossing:
                continue
            key = source.segment, target.segment, shapes[target.group], producer.direction
            if key not in send_seconds:
                shape = schedule.groups[target.group].shape
                send = SendId(source.segment, target.segment, shape, producer.direction)
                send_seconds[key] = prices.sends.get(send, 0.0)
            if send_seconds[key]:
                link = submesh[producer.segment], submesh[reader.segment]
                sends.setdefault(producer, {})[reader] = link, send_seconds[key]
    return sends


def _noise_factors(n: int, noise: Noise | None, step: int, kind: int) -> Iterator[float]:
    """Return noise factors of a step's tasks (kind 0) or sends (kind 1), drawn separately."""
    if noise is None or noise.sigma == 0:
        return iter([1.0] * n)
    z = np.random.default_rng([noise.seed, step, kind]).standard_normal(n)
    return iter(np.exp(noise.sigma * z - noise.sigma**2 / 2).tolist())


def with_list_order(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> Schedule:
    """Return the schedule with the faster of two list-scheduled orders and its simulated makespan.

    One order uses textbook durations, the other the prices. The second is not always faster, since
    a greedy rule may choose badly even with exact durations.
    """
    graph = step_graph(plan.layout, schedule.groups, trainable)
    seconds = task_seconds(schedule, prices)
    makespan_s = makespan_function(plan, schedule, graph, prices)
    order, priced = list_schedules(plan, graph, schedule.groups, seconds)
    best_s = makespan_s(order)
    if priced != order and (other_s := makespan_s(priced)) < best_s * (1 - _ROUNDING):
        order, best_s = priced, other_s
    return replace(schedule, order=tuple(graph.tasks[i] for i in order), makespan_s=best_s)


def makespan_function(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices
) -> Callable[[Sequence[int]], float]:
    """Return a function that gives the simulated seconds of an order of task numbers."""
    layout, resource_of = plan.layout, segment_resources(plan.layout)
    devices = [0] * (max(resource_of.values()) + 1)
    for s in layout.segments:
        r = resource_of[s.name]
        devices[r] = max(devices[r], layout.submesh(s.submesh).n_devices)
    resource = [resource_of[t.segment] for t in graph.tasks]
    task_s = list(map(task_seconds(schedule, prices), graph.tasks))
    successors, n_links = add_sends(graph, task_sends(layout, schedule, graph, prices))

    def simulated_s(order: Sequence[int]) -> float:
        if sum(devices) > prices.concurrency:
            tasks = [graph.tasks[i] for i in order]
            return simulate_order(layout, schedule, graph, tasks, prices).makespan_s
        return float(run_in_order(order, resource, task_s, successors, len(devices), n_links)[1])

    return simulated_s


def simulate_schedules(
    plan: Plan,
    schedules: Sequence[Schedule],
    prices: Prices,
    trainable: Collection[str],
    **options: Any,
) -> Trace:
    """Return a trace of consecutive steps with consecutive group numbers; `options` of
    `simulate_step`."""
    events: list[Event] = []
    offset_s, first_group = 0.0, 0
    for schedule in schedules:
        one = simulate_step(plan, schedule, prices, trainable, **options)
        for e in one.events:
            group = e.group + first_group if e.group != NO_GROUP else NO_GROUP
            start_s, end_s = e.start_s + offset_s, e.end_s + offset_s
            events.append(replace(e, group=group, start_s=start_s, end_s=end_s))
        offset_s += one.makespan_s
        first_group += len(schedule.groups)
    return Trace(schedules[0].step if schedules else 0, "simulated", tuple(events))


@dataclass(frozen=True)
class SimJob:
    """A job that starts when the jobs it waits for and earlier jobs of its resource have ended."""

    resource: Hashable
    seconds: float  # when it runs alone
    waits_for: tuple[int, ...] = ()  # indices of earlier jobs
    devices: int = 0  # number that compute; 0: a transfer, which computing jobs do not slow down


Times = list[float]  # by job


def run_jobs(jobs: Sequence[SimJob], concurrency: float = math.inf) -> tuple[Times, Times]:
    """Return (starts, ends) of jobs in seconds, if `concurrency` devices can compute at a time."""
    devices: dict[Hashable, int] = {}
    for job in jobs:
        devices[job.resource] = max(devices.get(job.resource, 0), job.devices)
    if sum(devices.values()) > concurrency:
        return _run_on_shared_cores(jobs, concurrency)
    start_s, end_s = [0.0] * len(jobs), [0.0] * len(jobs)
    free_s: dict[Hashable, float] = {}  # end of each resource's last job
    for i, job in enumerate(jobs):
        job_start_s = free_s.get(job.resource, 0.0)
        for input_job in job.waits_for:
            assert input_job < i, "a job waits for a later one"
            if end_s[input_job] > job_start_s:
                job_start_s = end_s[input_job]
        start_s[i] = job_start_s
        free_s[job.resource] = end_s[i] = job_start_s + job.seconds
    return start_s, end_s


def _run_on_shared_cores(jobs: Sequence[SimJob], concurrency: float) -> tuple[Times, Times]:
    """Return `run_jobs` for computing jobs that slow each other down."""
    n_pending = [0] * len(jobs)  # unfinished jobs that a job waits for, with its resource's last
    followers: list[list[int]] = [[] for _ in jobs]
    last: dict[Hashable, int] = {}
    for i, job in enumerate(jobs):
        input_jobs = {*job.waits_for, last.get(job.resource, i)} - {i}
        assert all(0 <= d < i for d in input_jobs), "a job waits for a later one"
        n_pending[i], last[job.resource] = len(input_jobs), i
        for d in input_jobs:
            followers[d].append(i)
    start_s, end_s = [0.0] * len(jobs), [0.0] * len(jobs)
    wall_ends: list[tuple[float, int]] = []  # (end in wall time, transfer job)
    work_ends: list[tuple[float, int]] = []  # (end in work done, computing job)
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
