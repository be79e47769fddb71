"""Simulates steps of a plan: the runtime's own task lists, with durations in place of programs.

Tasks of a resource run in list order; a task starts when its inputs are there and its resource is
free. Where devices share cores (`concurrency` below the device count), tasks that overlap slow each
other down in proportion to the devices they use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dflop_jax.pipeline.order import order_tasks, resources, step_graph
from dflop_jax.records import (
    REDUCE,
    UPDATE,
    Event,
    Plan,
    Schedule,
    Task,
    Trace,
)


def simulate_step(
    plan: Plan,
    buckets: Sequence[int],
    seconds: Mapping[Task, float],
    trainable: Collection[str],
    *,
    concurrency: float = float("inf"),
    step: int = 0,
) -> Trace:
    """Trace of one step whose groups use `buckets`.

    Args:
      seconds: duration of (segment, bucket index, direction) when run alone; absent ones are 0.
      concurrency: devices that really compute at once.
    """
    graph = step_graph(plan, buckets, trainable)
    order = order_tasks(plan, graph)
    of = resources(plan)
    submesh = {s.name: s.submesh for s in plan.segments}
    size = {m.name: m.n_devices for m in plan.submeshes}
    queues: dict[int, list[Task]] = {}
    for task in order:
        queues.setdefault(of[submesh[task.segment]], []).append(task)
    for q in queues.values():
        q.reverse()
    running: dict[int, Task] = {}
    left: dict[int, float] = {}
    started: dict[Task, float] = {}
    ended: dict[Task, float] = {}
    now = 0.0

    def duration(task: Task) -> float:
        if task.direction in (REDUCE, UPDATE):
            return seconds.get(task, 0.0)
        return seconds.get(Task(task.segment, buckets[task.group], task.direction), 0.0)

    def pace(task: Task, total: int) -> float:
        alone = min(1.0, concurrency / size[submesh[task.segment]])
        return min(1.0, concurrency / total) / alone

    while len(ended) < len(order):
        for r, q in sorted(queues.items()):
            if r not in running and q and all(d in ended for d in graph.waits_for[q[-1]]):
                task = q.pop()
                running[r], left[r], started[task] = task, duration(task), now
        assert running, "tasks wait for each other"
        total = sum(size[submesh[t.segment]] for t in running.values())
        paces = {r: pace(t, total) for r, t in running.items()}
        passed = min(left[r] / paces[r] for r in running)
        now += passed
        for r in sorted(running):
            left[r] -= passed * paces[r]
            if left[r] <= 1e-12:
                ended[running.pop(r)] = now
    events = tuple(
        Event(submesh[t.segment], t.segment, t.group, t.direction, started[t], ended[t])
        for t in order
    )
    return Trace(step, "simulated", events)


def simulate_schedules(
    plan: Plan,
    schedules: Sequence[Schedule],
    seconds: Mapping[Task, float],
    trainable: Collection[str],
    *,
    concurrency: float = float("inf"),
) -> Trace:
    """Steps one after another in one trace; groups keep counting."""
    events: list[Event] = []
    offset, first_group = 0.0, 0
    for schedule in schedules:
        buckets = [group[0].bucket for group in schedule.groups]
        one = simulate_step(
            plan, buckets, seconds, trainable, concurrency=concurrency, step=schedule.step
        )
        events += [
            replace(
                e,
                group=e.group + first_group if e.group >= 0 else e.group,
                start_s=e.start_s + offset,
                end_s=e.end_s + offset,
            )
            for e in one.events
        ]
        offset += one.makespan_s
        first_group += len(buckets)
    return Trace(schedules[0].step if schedules else 0, "simulated", tuple(events))
