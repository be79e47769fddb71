"""What the search of an order starts from: a step's tasks at their prices, and which are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.records import NO_GROUP, Plan, Prices, Schedule, Task
from dflop_jax.schedule.solver.problem import Ints
from dflop_jax.sim.pipeline import sends_of, task_seconds
from dflop_jax.tasks.graph import StepGraph
from dflop_jax.tasks.numbered import NumberedTasks, most_kept, number_tasks


def problem_of(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices, order: Sequence[Task]
) -> NumberedTasks:
    """The tasks of a step, at the prices of tasks that nothing slows down.

    A segment may keep as many groups as in 1F1B (`order.in_flight_limit`), or as it does in
    `order` where that is more.
    """
    seconds = task_seconds(plan.layout, schedule, prices)
    sent = sends_of(plan.layout, schedule, graph, prices)
    tasks = number_tasks(plan, graph, schedule.groups, seconds, sent)
    kept_by_order = most_kept(tasks, [graph.place[t] for t in order])
    limit = tuple(map(max, tasks.limit, kept_by_order))
    return replace(tasks, limit=limit, alike=_alike(schedule, graph))


def _alike(schedule: Schedule, graph: StepGraph) -> tuple[Ints, ...]:
    """By module, and by module and direction, the tasks of each group, segment by segment: arrays
    [groups, tasks] of two rows or more."""
    tasks: dict[tuple[str, str], dict[int, list[int]]] = {}
    for i, t in enumerate(graph.tasks):
        if t.group != NO_GROUP:
            for kind in ("", t.direction):
                by_group = tasks.setdefault((schedule.groups[t.group].module, kind), {})
                by_group.setdefault(t.group, []).append(i)
    return tuple(np.array(list(g.values())) for g in tasks.values() if len(g) > 1)
