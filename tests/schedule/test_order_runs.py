"""The order that a run's schedule gets, and the bound that it carries."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import NO_GROUP, REDUCE, UPDATE, Bucket, Load, Shape, Task
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bounds import lower_bound_s
from dflop_jax.schedule.order_search import order_problem
from dflop_jax.simulate.steps import with_list_order
from dflop_jax.simulate.task_graph import step_graph
from tests.schedule.conftest import TILE, bucket, make_batch, make_plan, make_prices
from tests.schedule.order_oracle import least_makespan


def uneven(program):
    """Prices of unlike segments and shapes."""
    return 1.0 + 0.7 * (program.shape.size % 3) + 0.5 * (program.segment == "b")


def three_modules(seed):
    """A module that reads one and is read by one, which shares devices with the first; loads are
    unlike."""
    shapes = {"a": Shape(8, TILE), "b": Shape(8, TILE), "c": Shape(1, 128)}
    plan = make_plan(
        [Bucket.of(shapes)],
        {"a": 1, "b": 1, "c": 1},
        edges=[("a", "b"), ("b", "c"), ("a", "c")],
        shared=("a", "c"),
    )
    rng = np.random.default_rng(seed)
    loads = [
        Load({m: (TILE,) * int(rng.integers(0, 5)) for m in "ab"} | {"c": (60,)}) for _ in range(16)
    ]
    return plan, loads


def test_a_run_gets_the_searched_order():
    """It is never slower than list scheduling, often faster, and the baselines' stays as it is."""
    faster = 0
    for seed in range(6):
        plan, loads = three_modules(seed)
        prices = make_prices(plan, factor=uneven)
        got = schedule_batch(loads, plan, prices, plan.layout.modules, work=600)
        listed = with_list_order(plan, replace(got, order=()), prices, plan.layout.modules)
        assert got.lower_bound_s <= got.makespan_s <= listed.makespan_s
        faster += got.makespan_s < listed.makespan_s * (1 - 1e-6)
        greedy = schedule_batch(loads, plan, prices, plan.layout.modules, work=0)
        assert greedy.order == with_list_order(plan, greedy, prices, plan.layout.modules).order
        fixed = schedule_batch(
            loads, plan.with_scheduling(order="gpipe"), prices, plan.layout.modules, work=600
        )
        again = with_list_order(
            plan.with_scheduling(order="gpipe"), fixed, prices, plan.layout.modules
        )
        assert fixed.order == again.order
    assert faster >= 3


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_below_the_best_order(seed):
    """With reductions and updates; of plans whose modules all train, or only one."""
    rng = np.random.default_rng(seed)
    plan = make_plan([bucket(8, (1, 128))], {"a": 1, "b": 1}, shared=("a", "b") * (seed % 3 == 0))
    trainable = plan.layout.modules if seed % 2 else ("b",)
    prices = make_prices(plan, trainable=trainable, factor=lambda p: float(rng.lognormal(0, 0.5)))
    end_s = {
        Task(m, NO_GROUP, d): float(rng.exponential(0.3))
        for m in plan.layout.modules
        for d in (REDUCE, UPDATE)
    }
    prices = replace(prices, step_end=end_s)
    loads = make_batch(rng, 6, most_tiles=8)
    got = schedule_batch(loads, plan, prices, trainable, work=400)
    tasks = step_graph(plan.layout, got.groups, trainable)
    order = [tasks.task_index[t] for t in got.order]
    problem = order_problem(plan, got, tasks, prices, order)
    least_s = least_makespan(problem) * problem.tick_s
    batch = Batch(loads, plan.layout.modules)
    bound_s = lower_bound_s(batch, plan.layout, prices, trainable)
    assert 0 < bound_s <= least_s * (1 + 1e-9)
    assert got.makespan_s <= least_s * (1 + 1e-8)
