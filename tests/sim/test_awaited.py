"""Submeshes that are given one task at a time, against a dispatching thread played by hand."""

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.tasks.graph import resources, step_graph
from dflop_jax.tasks.order import order_tasks
from tests.sim.cases import batch, chain, names, prices, random_case
from tests.sim.test_pipeline import spans_of


def played(plan, schedule, priced, trainable, awaited):
    """(start, end) of every task: the thread walks the order, and before a task of an awaited
    submesh sleeps until its devices have done all they were given."""
    graph = step_graph(plan.layout, schedule.groups, trainable)
    resource, submesh = resources(plan.layout), {s.name: s.submesh for s in plan.layout.segments}
    now, free, spans = 0.0, {}, {}
    for task in order_tasks(plan, graph, schedule.groups):
        on = resource[submesh[task.segment]]
        if submesh[task.segment] in awaited:
            now = max(now, free.get(on, 0.0))
        inputs = [spans[d][1] for d in graph.waits_for[task]]
        start = max([now, free.get(on, 0.0), *inputs])
        spans[task] = start, start + priced.task_s(plan.layout, schedule, task)
        free[on] = spans[task][1]
    return spans


def test_dispatch_waits_as_the_thread_does():
    rng = np.random.default_rng(0)
    later = 0
    for _ in range(120):
        plan, schedule, priced, trainable = random_case(rng)
        awaited = {m.name for m in plan.layout.submeshes if rng.random() < 0.6}
        trace = simulate_step(plan, schedule, priced, trainable, awaited=awaited)
        assert spans_of(trace) == played(plan, schedule, priced, trainable, awaited)
        free = simulate_step(plan, schedule, priced, trainable)
        assert trace.makespan_s >= free.makespan_s
        later += trace.makespan_s > free.makespan_s
    assert later > 10  # it does hold tasks up


@pytest.mark.parametrize("n_groups", [0, 1])
def test_nothing_and_one_group_are_not_held_up(n_groups):
    plan = chain(2, sources=1)
    priced = prices(plan, {("a0", FORWARD): 1.0, ("b0", BACKWARD): 2.0})
    schedule = batch(plan, n_groups)
    free = simulate_step(plan, schedule, priced, names(plan))
    assert simulate_step(plan, schedule, priced, names(plan), awaited=["a0", "b0"]) == free
