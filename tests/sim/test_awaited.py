"""Submeshes that are given one task at a time, against a dispatching thread played by hand."""

import numpy as np
import pytest

from dflop_jax.pipeline.order import order_tasks, resources, step_graph
from dflop_jax.records import BACKWARD, FORWARD, Task
from dflop_jax.sim.pipeline import simulate_step
from tests.plans import chain
from tests.sim.test_simulate import names, random_case


def played(plan, buckets, seconds, trainable, awaited):
    """(start, end) of every task: the thread walks the order, and before a task of an awaited
    submesh sleeps until its devices have done all they were given."""
    graph = step_graph(plan, buckets, trainable)
    of, on = resources(plan), {s.name: s.submesh for s in plan.segments}
    now, free, spans = 0.0, {}, {}
    for task in order_tasks(plan, graph):
        resource = of[on[task.segment]]
        if on[task.segment] in awaited:
            now = max(now, free.get(resource, 0.0))
        inputs = [spans[d][1] for d in graph.waits_for[task]]
        start = max([now, free.get(resource, 0.0), *inputs])
        key = task if task.group < 0 else Task(task.segment, buckets[task.group], task.direction)
        spans[task] = start, start + seconds.get(key, 0.0)
        free[resource] = spans[task][1]
    return spans


def test_dispatch_waits_as_the_thread_does():
    rng = np.random.default_rng(0)
    later = 0
    for _ in range(200):
        plan, buckets, seconds, trainable = random_case(rng)
        awaited = {m.name for m in plan.submeshes if rng.random() < 0.6}
        trace = simulate_step(plan, buckets, seconds, trainable, awaited=awaited)
        found = {Task(e.segment, e.group, e.direction): (e.start_s, e.end_s) for e in trace.events}
        assert found == played(plan, buckets, seconds, trainable, awaited)
        free = simulate_step(plan, buckets, seconds, trainable)
        assert trace.makespan_s >= free.makespan_s
        later += trace.makespan_s > free.makespan_s
    assert later > 10  # it does hold tasks up


@pytest.mark.parametrize("buckets", [[], [0]])
def test_nothing_and_one_group_are_not_held_up(buckets):
    plan = chain(2, vision=1)
    seconds = {Task("v0", 0, FORWARD): 1.0, Task("l0", 0, BACKWARD): 2.0}
    free = simulate_step(plan, buckets, seconds, names(plan))
    assert simulate_step(plan, buckets, seconds, names(plan), awaited=["v0", "l0"]) == free
