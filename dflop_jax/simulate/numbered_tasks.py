"""A step's tasks as numbers, for list scheduling and order search, and the evaluation of orders.

The number of a task is its index in the graph's canonical order. An order is a permutation of these
numbers. A resource runs its part of it in that order, and a link carries sends in the order of the
tasks that send. A segment holds a group from its forward, which opens it, to its backward, which
closes it.

Times are whole ticks: sums are exact, equal times are equal, and no choice depends on the last bit
of a price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from dflop_jax.records import Group, Plan, Task
from dflop_jax.simulate.task_graph import (
    StepGraph,
    in_flight_changes,
    in_flight_limit,
    segment_resources,
)

NO_LINK = -1  # the link of what reaches a task without any
# Ticks of all seconds of a step together: sums are exact, and each of 100,000 tasks is rounded by
# less than a millionth.
_TICKS_PER_STEP = 100_000_000_000
Time = TypeVar("Time", int, float)
Successor = tuple[int, int, int]  # a task that waits, the link that carries to it or NO_LINK, ticks
Sends = Mapping[Task, Mapping[Task, tuple[object, float]]]  # task -> reader -> (link, seconds)


@dataclass(frozen=True, eq=False)
class StepTasks:
    """Tasks 0..n_tasks-1. `resource` runs each for `ticks` of `tick_s` seconds, then its
    `successors` are sent.

    `live_change` is +1 if a task opens a group in its `segment`, -1 if it closes one, else 0; a
    segment holds at most `max_live` groups. `interchangeable` has tasks that may be swapped row by
    row: arrays [units, tasks] with two rows or more.
    """

    resource: tuple[int, ...]
    ticks: tuple[int, ...]
    successors: tuple[tuple[Successor, ...], ...]
    segment: tuple[int, ...]
    live_change: tuple[int, ...]
    max_live: tuple[int, ...]
    n_resources: int
    n_links: int
    tick_s: float
    interchangeable: tuple[np.ndarray, ...] = ()

    @property
    def n_tasks(self) -> int:
        return len(self.ticks)

    @cached_property
    def n_inputs(self) -> tuple[int, ...]:
        """The number of tasks that each task waits for."""
        counts = [0] * self.n_tasks
        for successors in self.successors:
            for reader, _, _ in successors:
                counts[reader] += 1
        return tuple(counts)

    @cached_property
    def mirrored(self) -> StepTasks:
        """The problem with time reversed. The reverse of an order of it is an order of this
        problem, and segments hold as many groups."""
        inputs: list[list[Successor]] = [[] for _ in range(self.n_tasks)]
        for t, successors in enumerate(self.successors):
            for reader, link, send in successors:
                inputs[reader].append((t, link, send))
        return replace(
            self,
            successors=tuple(map(tuple, inputs)),
            live_change=tuple(-k for k in self.live_change),
        )

    def is_within_limits(self, order: Sequence[int]) -> bool:
        """Whether no segment holds more groups than its limit."""
        return all(a <= b for a, b in zip(peak_in_flight(self, order), self.max_live))


def number_tasks(
    plan: Plan,
    graph: StepGraph,
    groups: Sequence[Group],
    seconds: Callable[[Task], float],
    sends: Sends | None = None,
    tick_s: float = 0.0,
) -> StepTasks:
    """The tasks of a step with these groups; the limits are those of 1F1B
    (`task_graph.in_flight_limit`).

    Args:
      seconds: of each task when nothing slows it down.
      sends: from each task to its readers over links.
      tick_s: seconds of a tick; 0: a fixed fraction of all seconds together.
    """
    segments = {s.name: i for i, s in enumerate(plan.layout.segments)}
    resource = segment_resources(plan.layout)
    task_s = [seconds(t) for t in graph.tasks]
    sends = sends or {}
    total_s = sum(task_s) + sum(s for readers in sends.values() for _, s in readers.values())
    tick_s = tick_s or (total_s or 1.0) / _TICKS_PER_STEP
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
    """For every task, (successor, link or NO_LINK, seconds) of all its successors; and the number
    of links."""
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
    """The largest number of groups that each segment holds at once."""
    live, peak = [0] * len(tasks.max_live), [0] * len(tasks.max_live)
    for t in order:
        s = tasks.segment[t]
        live[s] += tasks.live_change[t]
        peak[s] = max(peak[s], live[s])
    return peak


def start_ticks(tasks: StepTasks, order: Sequence[int]) -> tuple[list[int], int]:
    """(start of each task, makespan) of an order, in ticks: the result of the event simulator if no
    task slows another down."""
    free_ticks = [0] * tasks.n_resources
    links = [0] * tasks.n_links
    return run_in_order(order, tasks.resource, tasks.ticks, tasks.successors, free_ticks, links)


def run_in_order(
    order: Sequence[int],
    resource: Sequence[int],
    seconds: Sequence[Time],
    successors: Sequence[Sequence[tuple[int, int, Time]]],
    free: list[Time],
    link_free: list[Time],
) -> tuple[list[Time], Time]:
    """`start_ticks` in any unit of time. `free` and `link_free` are the times at which resources
    and links become free; they are updated."""
    makespan = min(free, default=0)
    starts = [makespan] * len(seconds)  # until a task's turn comes: when its inputs are there
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
