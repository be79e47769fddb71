"""A step's tasks as integers, list schedules of them, and the evaluation of orders.

A task's number is its index in the graph's canonical order; an order is a permutation of numbers.
Each resource runs its tasks in that order, and each link carries sends in the order of the sending
tasks. A group is in flight in a segment from its forward, which opens it, to its backward, which
closes it. Times are integer ticks, so that no decision depends on the last bit of a price.

A list schedule runs the ready task with the lowest key on every free resource. A serial schedule
appends the task with the lowest key of all tasks whose inputs are scheduled, even if it must wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dflop_jax.records import Group, Plan, Task
from dflop_jax.simulate.task_graph import (
    StepGraph,
    in_flight_changes,
    in_flight_limit,
    segment_resources,
)

NO_LINK = -1  # a successor on the same submesh needs no link
# Ticks of the total task and send time of a step: sums are exact, and each of 100,000 tasks is
# rounded by less than 1e-6.
_TICKS_PER_STEP = 100_000_000_000
Successor = tuple[int, int, int]  # (waiting task, link of the send or NO_LINK, ticks of the send)
Sends = Mapping[Task, Mapping[Task, tuple[object, float]]]  # task -> reader -> (link, seconds)


@dataclass(frozen=True, eq=False)
class StepTasks:
    """Tasks of a step, numbered 0..n_tasks-1. Fields are indexed by task unless noted."""

    resource: tuple[int, ...]
    ticks: tuple[int, ...]  # run time; then the results are sent to successors
    successors: tuple[tuple[Successor, ...], ...]
    segment: tuple[int, ...]
    live_change: tuple[int, ...]  # +1 if a task opens a group in its segment, -1 if it closes one
    max_live: tuple[int, ...]  # maximum number of groups in flight, by segment
    n_resources: int
    n_links: int
    tick_s: float  # seconds per tick
    # Arrays [units, tasks] with at least two rows; the order may swap rows of an array.
    interchangeable: tuple[np.ndarray, ...] = ()

    @property
    def n_tasks(self) -> int:
        return len(self.ticks)

    @cached_property
    def n_inputs(self) -> tuple[int, ...]:
        """Number of tasks that each task waits for."""
        counts = [0] * self.n_tasks
        for successors in self.successors:
            for reader, _, _ in successors:
                counts[reader] += 1
        return tuple(counts)

    @cached_property
    def mirrored(self) -> StepTasks:
        """The problem with time reversed; its reversed orders are valid orders of this problem."""
        inputs: list[list[Successor]] = [[] for _ in range(self.n_tasks)]
        for t, successors in enumerate(self.successors):
            for reader, link, send in successors:
                inputs[reader].append((t, link, send))
        changes = tuple(-k for k in self.live_change)
        return replace(self, successors=tuple(map(tuple, inputs)), live_change=changes)

    def is_within_limits(self, order: Sequence[int]) -> bool:
        """Return whether no segment exceeds its limit of groups in flight."""
        return all(a <= b for a, b in zip(peak_in_flight(self, order), self.max_live))


def number_tasks(
    plan: Plan,
    graph: StepGraph,
    groups: Sequence[Group],
    seconds: Callable[[Task], float],
    sends: Sends | None = None,
) -> StepTasks:
    """Return the numbered tasks of a step, with 1F1B's limits (`in_flight_limit`). `seconds`: a
    task's time when it runs alone; `sends`: the sends to its readers over links."""
    segments = {s.name: i for i, s in enumerate(plan.layout.segments)}
    resource, sends = segment_resources(plan.layout), sends or {}
    task_s = [seconds(t) for t in graph.tasks]
    total_s = sum(task_s) + sum(s for readers in sends.values() for _, s in readers.values())
    tick_s = (total_s or 1.0) / _TICKS_PER_STEP
    with_sends, n_links = add_sends(graph, sends)
    limits = in_flight_limit(plan, groups)
    return StepTasks(
        resource=tuple(resource[t.segment] for t in graph.tasks),
        ticks=tuple(round(s / tick_s) for s in task_s),
        successors=tuple(tuple((t, k, round(s / tick_s)) for t, k, s in row) for row in with_sends),
        segment=tuple(segments[t.segment] for t in graph.tasks),
        live_change=tuple(in_flight_changes(graph.tasks)),
        max_live=tuple(limits[s.name] for s in plan.layout.segments),
        n_resources=max(resource.values()) + 1,
        n_links=n_links,
        tick_s=tick_s,
    )


def add_sends(
    graph: StepGraph, sends: Sends
) -> tuple[list[tuple[tuple[int, int, float], ...]], int]:
    """Return ([(successor, link or NO_LINK, seconds of the send)] by task, number of links)."""
    links: dict[object, int] = {}
    successors = [tuple((f, NO_LINK, 0.0) for f in followers) for followers in graph.followers]
    for task, readers in sends.items():
        i = graph.task_index[task]
        row = [
            (graph.task_index[reader], links.setdefault(link, len(links)), s)
            for reader, (link, s) in readers.items()
        ]
        reached = {reader for reader, _, _ in row}
        successors[i] = (*row, *(o for o in successors[i] if o[0] not in reached))
    return successors, len(links)


def peak_in_flight(tasks: StepTasks, order: Sequence[int]) -> list[int]:
    """Return the maximum number of groups in flight in each segment."""
    live, peak = [0] * len(tasks.max_live), [0] * len(tasks.max_live)
    for t in order:
        s = tasks.segment[t]
        live[s] += tasks.live_change[t]
        peak[s] = max(peak[s], live[s])
    return peak


def start_ticks(tasks: StepTasks, order: Sequence[int]) -> tuple[list[int], int]:
    """Return (start of each task, makespan) of an order, if tasks do not slow each other down."""
    sizes = tasks.n_resources, tasks.n_links
    return run_in_order(order, tasks.resource, tasks.ticks, tasks.successors, *sizes)


def run_in_order(
    order: Sequence[int],
    resource: Sequence[int],
    seconds: Sequence[Any],
    successors: Sequence[Sequence[tuple[int, int, Any]]],
    n_resources: int,
    n_links: int,
) -> tuple[list[Any], Any]:
    """Return `start_ticks` in any unit of time."""
    free, link_free = [0] * n_resources, [0] * n_links  # time at which each becomes free
    makespan = 0
    starts = [0] * len(seconds)  # before a task is scheduled: arrival time of its inputs
    for t in order:
        r = resource[t]
        if free[r] > starts[t]:
            starts[t] = free[r]
        free[r] = end = starts[t] + seconds[t]
        if end > makespan:
            makespan = end
        for reader, link, send in successors[t]:
            arrives = end
            if link >= 0:
                if link_free[link] > end:
                    arrives = link_free[link]
                link_free[link] = arrives = arrives + send
            if arrives > starts[reader]:
                starts[reader] = arrives
    return starts, makespan


def list_schedule(problem: StepTasks, keys: Sequence[int], *, alternate: bool = False) -> list[int]:
    """Return the order in which tasks start in a list schedule. If nothing runs and every segment
    with a ready task is at its limit, one limit is exceeded. `alternate`: a resource with ready
    forward and backward tasks alternates between them (dual-queue rule)."""
    ticks, resource, successors = problem.ticks, problem.resource, problem.successors
    queues = _ReadyQueues(problem, keys, alternate)
    n_pending, ready_ticks = list(problem.n_inputs), [0] * problem.n_tasks
    link_free = [0] * problem.n_links
    idle = [True] * problem.n_resources
    order: list[int] = []
    # Events: a task's inputs have arrived, or a resource's task ends (-1 - resource).
    events = [(0, t) for t in range(problem.n_tasks) if not n_pending[t]]
    now_ticks = 0
    while len(order) < problem.n_tasks:
        full = not events
        touched = set(range(problem.n_resources)) if full else set()
        if events:
            now_ticks = events[0][0]
        while events and events[0][0] <= now_ticks:
            code = heapq.heappop(events)[1]
            if code < 0:
                idle[-1 - code] = True
                touched.add(-1 - code)
            else:
                queues.add(code)
                touched.add(resource[code])
        for r in sorted(touched):
            if not idle[r] or (t := queues.pop_next(r, full)) is None:
                continue
            order.append(t)
            idle[r], full = False, False
            end = now_ticks + ticks[t]
            heapq.heappush(events, (end, -1 - r))
            for reader, link, send in successors[t]:
                arrives = end
                if link >= 0:
                    if link_free[link] > end:
                        arrives = link_free[link]
                    link_free[link] = arrives = arrives + send
                if arrives > ready_ticks[reader]:
                    ready_ticks[reader] = arrives
                n_pending[reader] -= 1
                if not n_pending[reader]:
                    heapq.heappush(events, (ready_ticks[reader], reader))
    return order


class _ReadyQueues:
    """Queues of ready tasks: per segment for tasks that open a group, per resource for others."""

    def __init__(self, problem: StepTasks, keys: Sequence[int], alternate: bool):
        self._problem, self._keys, self._alternate = problem, keys, alternate
        self._in_flight = [0] * len(problem.max_live)
        self._opens: list[list[tuple[int, int]]] = [[] for _ in problem.max_live]
        self._others: list[list[tuple[int, int]]] = [[] for _ in range(problem.n_resources)]
        self._opened_last = [False] * problem.n_resources
        pairs = zip(problem.live_change, problem.resource, problem.segment, strict=True)
        used = dict.fromkeys((r, s) for change, r, s in pairs if change > 0)
        self._segments = [[s for r, s in used if r == k] for k in range(problem.n_resources)]

    def add(self, task: int) -> None:
        if self._problem.live_change[task] > 0:
            queue = self._opens[self._problem.segment[task]]
        else:
            queue = self._others[self._problem.resource[task]]
        heapq.heappush(queue, (self._keys[task], task))

    def pop_next(self, resource: int, full: bool) -> int | None:
        """Remove and return the next task of a resource; `full` ignores the segments' limits."""
        max_live, in_flight = self._problem.max_live, self._in_flight
        best_queue: list[tuple[int, int]] = []
        for s in self._segments[resource]:
            queue, can_open = self._opens[s], full or in_flight[s] < max_live[s]
            if queue and can_open and (not best_queue or queue[0] < best_queue[0]):
                best_queue = queue
        other_queue = self._others[resource]
        if other_queue and best_queue:
            opened_last = self._opened_last[resource]
            take_other = opened_last if self._alternate else other_queue[0] < best_queue[0]
            best_queue = other_queue if take_other else best_queue
        best_queue = best_queue or other_queue
        if not best_queue:
            return None
        task = heapq.heappop(best_queue)[1]
        live_change = self._problem.live_change[task]
        self._opened_last[resource] = live_change > 0
        in_flight[self._problem.segment[task]] += live_change
        return task


def backward_list_schedule(problem: StepTasks, order: Sequence[int]) -> list[int]:
    """Return a list schedule backward in time, in which the task that ends last in `order` is
    first."""
    starts, _ = start_ticks(problem.mirrored, order)
    return list_schedule(problem, [-(start + ticks) for start, ticks in zip(starts, problem.ticks)])


def serial_schedule(problem: StepTasks, keys: Sequence[int]) -> list[int]:
    """Return the order that always appends the ready task with the lowest key, within limits."""
    segment, max_live, live_change = problem.segment, problem.max_live, problem.live_change
    n_pending, in_flight = list(problem.n_inputs), [0] * len(max_live)
    ready_tasks = [(keys[t], t) for t in range(problem.n_tasks) if not n_pending[t]]
    heapq.heapify(ready_tasks)
    blocked: list[list[tuple[int, int]]] = [[] for _ in max_live]
    order: list[int] = []
    while len(order) < problem.n_tasks:
        full = not ready_tasks
        key, t = heapq.heappop(ready_tasks) if ready_tasks else min(min(b) for b in blocked if b)
        s = segment[t]
        if full:
            blocked[s].remove((key, t))
        elif live_change[t] > 0 and in_flight[s] >= max_live[s]:
            blocked[s].append((key, t))
            continue
        order.append(t)
        in_flight[s] += live_change[t]
        if live_change[t] < 0:
            for task in blocked[s]:
                heapq.heappush(ready_tasks, task)
            blocked[s].clear()
        for reader, _, _ in problem.successors[t]:
            n_pending[reader] -= 1
            if not n_pending[reader]:
                heapq.heappush(ready_tasks, (keys[reader], reader))
    return order
