"""A step's tasks as numbers: what every search of their order reads, and the evaluator of orders.

A task's number is its place in the graph's canonical order. An order is a permutation of them; a
resource runs its part of it in that order, and a link carries its sends in the order of the tasks
that send. A segment keeps a group from its forward, which *opens* it, to its backward, which
*closes* it.

Times are whole ticks, so that sums are exact, equal times are equal, and no choice hangs on the
last bit of a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dflop_jax.pipeline.order import StepGraph, in_flight_limit, resources
from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, Layout, Plan, Prices, Schedule, Task
from dflop_jax.schedule.solver.problem import Ints
from dflop_jax.sim.pipeline import sends_of, task_seconds

NO_LINK = -1
_TICKS = 100_000_000_000  # of all tasks and sends together
Out = tuple[int, int, int]  # a task that waits, the link that carries to it or NO_LINK, ticks


@dataclass(frozen=True, eq=False)
class Problem:
    """Tasks 0..n-1: `resource` runs each for `ticks` of `tick_s` seconds, then its `out` is sent.

    `keeps` is +1 where a task opens a group in its `segment`, -1 where it closes one, else 0; a
    segment keeps at most `limit` groups. `alike` holds, by module, and by module and direction, the
    tasks of each group, segment by segment: arrays [groups, tasks] of two rows or more.
    """

    resource: tuple[int, ...]
    ticks: tuple[int, ...]
    out: tuple[tuple[Out, ...], ...]
    segment: tuple[int, ...]
    keeps: tuple[int, ...]
    alike: tuple[Ints, ...]
    limit: tuple[int, ...]
    n_resources: int
    n_links: int
    tick_s: float

    @property
    def n(self) -> int:
        return len(self.ticks)

    @cached_property
    def n_waits(self) -> tuple[int, ...]:
        """How many tasks each waits for."""
        counts = [0] * self.n
        for out in self.out:
            for reader, _, _ in out:
                counts[reader] += 1
        return tuple(counts)

    @cached_property
    def mirrored(self) -> Problem:
        """The problem in which time runs backwards. An order of it, turned round, is one of this
        problem, in which segments keep as many groups."""
        into: list[list[Out]] = [[] for _ in range(self.n)]
        for t, out in enumerate(self.out):
            for reader, link, send in out:
                into[reader].append((t, link, send))
        return replace(self, out=tuple(map(tuple, into)), keeps=tuple(-k for k in self.keeps))

    def allows(self, order: Sequence[int]) -> bool:
        """Whether no segment keeps more groups than its limit."""
        return all(a <= b for a, b in zip(most_kept(self, order), self.limit))


def problem_of(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices, order: Sequence[Task]
) -> Problem:
    """The tasks of a step, at the prices of tasks that nothing slows down.

    A segment may keep as many groups as in 1F1B (`order.in_flight_limit`), or as it does in
    `order` where that is more.
    """
    place = {t: i for i, t in enumerate(graph.tasks)}
    segments = {s.name: i for i, s in enumerate(plan.layout.segments)}
    of = resources(plan.layout)
    ids = sorted(set(of.values()))
    where = [ids.index(of[s.submesh]) for s in plan.layout.segments]
    seconds = task_seconds(plan.layout, schedule, prices)
    out_s, n_links = _out(plan.layout, schedule, graph, prices, place)
    task_s = [seconds(t) for t in graph.tasks]
    total_s = sum(task_s) + sum(send_s for out in out_s for _, _, send_s in out)
    tick_s = (total_s or 1.0) / _TICKS
    both = {(t.segment, t.group) for t in graph.tasks if t.direction == FORWARD} & {
        (t.segment, t.group) for t in graph.tasks if t.direction == BACKWARD
    }
    sign = {FORWARD: 1, BACKWARD: -1}
    limits = in_flight_limit(plan, schedule.groups)
    problem = Problem(
        resource=tuple(where[segments[t.segment]] for t in graph.tasks),
        ticks=tuple(round(s / tick_s) for s in task_s),
        out=tuple(tuple((r, link, round(s / tick_s)) for r, link, s in out) for out in out_s),
        segment=tuple(segments[t.segment] for t in graph.tasks),
        keeps=tuple(sign[t.direction] * ((t.segment, t.group) in both) if t.direction in sign else 0
                    for t in graph.tasks),
        alike=_alike(schedule, graph),
        limit=tuple(limits[s.name] for s in plan.layout.segments),
        n_resources=len(ids),
        n_links=n_links,
        tick_s=tick_s,
    )  # fmt: skip
    most = most_kept(problem, [place[t] for t in order])
    return replace(problem, limit=tuple(map(max, problem.limit, most)))


def _alike(schedule: Schedule, graph: StepGraph) -> tuple[Ints, ...]:
    """Tasks of the groups of each module, and of each module and direction, segment by segment."""
    tasks: dict[tuple[str, str], dict[int, list[int]]] = {}
    for i, t in enumerate(graph.tasks):
        if t.group != NO_GROUP:
            for kind in ("", t.direction):
                by_group = tasks.setdefault((schedule.groups[t.group].module, kind), {})
                by_group.setdefault(t.group, []).append(i)
    return tuple(np.array(list(g.values())) for g in tasks.values() if len(g) > 1)


def _out(
    layout: Layout, schedule: Schedule, graph: StepGraph, prices: Prices, place: dict[Task, int]
) -> tuple[list[list[tuple[int, int, float]]], int]:
    """What waits for each task: (reader, link, seconds), in the order in which the link carries
    them; and how many links there are."""
    submesh = {s.name: s.submesh for s in layout.segments}
    sends = sends_of(layout, schedule, graph, prices)
    links: dict[tuple[str, str], int] = {}
    rows = []
    for t in graph.tasks:
        sent = {s.reader: s.seconds for s in sends.get(t, ())}
        row = []
        for reader, send_s in sent.items():
            pair = submesh[t.segment], submesh[reader.segment]
            row.append((place[reader], links.setdefault(pair, len(links)), send_s))
        row += [(place[f], NO_LINK, 0.0) for f in graph.followers[t] if f not in sent]
        rows.append(row)
    return rows, len(links)


def most_kept(problem: Problem, order: Sequence[int]) -> list[int]:
    """Most groups that each segment keeps at once."""
    now, most = [0] * len(problem.limit), [0] * len(problem.limit)
    for t in order:
        s = problem.segment[t]
        now[s] += problem.keeps[t]
        most[s] = max(most[s], now[s])
    return most


def starts_of(problem: Problem, order: Sequence[int]) -> tuple[list[int], int]:
    """(start of each task, makespan) of an order, in ticks: what the event simulator says where
    nothing slows a task down."""
    ticks, resource, out = problem.ticks, problem.resource, problem.out
    starts = [0] * problem.n  # until a task's turn comes: when its inputs are there
    free, link_free = [0] * problem.n_resources, [0] * problem.n_links
    makespan = 0
    for t in order:
        r = resource[t]
        if free[r] > starts[t]:
            starts[t] = free[r]
        free[r] = end = starts[t] + ticks[t]
        if end > makespan:
            makespan = end
        for reader, link, send in out[t]:
            arrives = end
            if link >= 0:
                if link_free[link] > end:
                    arrives = link_free[link]
                link_free[link] = arrives = arrives + send
            if arrives > starts[reader]:
                starts[reader] = arrives
    return starts, makespan
