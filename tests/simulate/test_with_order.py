"""The order that a schedule gets: against the textbook's, on profiles made at random."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import both_orders, check_order, order_tasks
from tests.simulate.cases import (
    batch,
    graph,
    names,
    prices,
    random_case,
)


def test_list_order_is_the_better_of_two():
    rng, better = np.random.default_rng(3), 0
    for _ in range(60):
        plan, schedule, priced, trainable = random_case(rng, sends=True)
        graph = step_graph(plan.layout, schedule.groups, trainable)
        seconds = partial(priced.task_s, plan, schedule)
        numbers = both_orders(plan, graph, schedule.groups, seconds)
        orders = [tuple(graph.tasks[t] for t in order) for order in numbers]
        assert orders[0] == order_tasks(plan, graph, schedule.groups)
        took_s = [
            simulate_step(plan, replace(schedule, order=o), priced, trainable).makespan_s
            for o in orders
        ]
        ordered = with_list_order(plan, schedule, priced, trainable)
        assert ordered.order in orders
        assert ordered.makespan_s == pytest.approx(min(took_s), rel=1e-8, abs=1e-12)
        assert ordered.makespan_s == simulate_step(plan, ordered, priced, trainable).makespan_s
        check_order(graph, ordered.order)
        assert replace(ordered, order=(), makespan_s=0.0) == schedule
        better += took_s[1] < took_s[0] * (1 - 1e-6)
    assert better > 3  # prices do change the order


def test_rounding_does_not_change_the_order():
    """Orders that take the same time but for the last bits: the textbook's, always."""
    plan = graph("a", "b", edges=["ab"])
    schedule = batch(plan, 6)
    seconds = {("a0", FORWARD): 0.1, ("a0", BACKWARD): 0.3, ("b0", BACKWARD): 0.7}
    first = with_list_order(plan, schedule, prices(plan, seconds), names(plan)).order
    rng = np.random.default_rng(0)
    for _ in range(20):
        moved = {k: v * (1 + rng.choice([-1, 0, 1]) * 2.0**-52) for k, v in seconds.items()}
        assert with_list_order(plan, schedule, prices(plan, moved), names(plan)).order == first
