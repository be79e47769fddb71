"""The order that a schedule gets: against the textbook's, on profiles made at random."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dflop_jax.plan.pricing import plan_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    LayerTiming,
    ModelProfile,
    Schedule,
)
from dflop_jax.sim.fastest_order import with_order
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.tasks.graph import step_graph
from dflop_jax.tasks.order import check_order, order_tasks
from tests.sim.cases import (
    SHAPES,
    batch,
    chain,
    graph,
    names,
    prices,
    random_case,
    random_plan,
    random_schedule,
    same_prices,
)


def random_profile(rng, plan):
    """A profile of a plan's modules with times as uneven as measured ones are."""
    timings = []
    for m in plan.layout.modules:
        weight, pair = rng.lognormal(0, 1.5), rng.lognormal(0, 1) * (rng.random() < 0.5)
        for shape in (*SHAPES, SHAPES[0]):
            f, b, ef, eb = weight * 1e-4 * shape.size * rng.lognormal(0, 0.2, 4) * (1, 3, 1, 2)
            pairs = 1e-7 * pair * weight
            content = {"pair": pairs}, {"pair": 2 * pairs}
            timings.append(LayerTiming(m, 1, shape, f, b, ef, eb, 0, *content))
    zero = dict.fromkeys(plan.layout.modules, 0)
    layers = {m: len(plan.layout.segments_of(m)) for m in plan.layout.modules}
    share = {m: float(rng.random()) for m in plan.layout.modules}
    concurrency = float(rng.choice([1.0, 2.0, 8.0]))
    return ModelProfile("k", "cpu", tuple(timings), zero, zero, layers, share, concurrency, 1e-3)


def test_no_order_is_worse_than_the_textbooks():
    """On 40 profiles made at random, of graphs with several producers, chains and inner edges."""
    rng, better = np.random.default_rng(0), 0
    for _ in range(40):
        plan = random_plan(rng)
        plan = plan.with_layout(submeshes=tuple(replace(m, model=1) for m in plan.layout.submeshes))
        schedule = random_schedule(rng, plan, 8)
        pairs = [replace(g, content=(int(rng.integers(0, 64**2)),)) for g in schedule.groups]
        schedule = replace(schedule, groups=tuple(pairs))
        priced = plan_prices(plan.layout, random_profile(rng, plan))
        ordered = with_order(plan, schedule, priced, names(plan))
        assert ordered.makespan_s == simulate_step(plan, ordered, priced, names(plan)).makespan_s
        textbook = simulate_step(plan, schedule, priced, names(plan))
        assert ordered.makespan_s <= textbook.makespan_s
        better += ordered.makespan_s < textbook.makespan_s * (1 - 1e-6)
        graph = step_graph(plan.layout, schedule.groups, names(plan))
        check_order(graph, ordered.order)
        assert replace(ordered, order=(), makespan_s=0.0) == schedule
    assert better > 5  # prices do change the order


def test_it_is_the_better_of_two_orders():
    rng = np.random.default_rng(3)
    for _ in range(60):
        plan, schedule, priced, trainable = random_case(rng, sends=True)
        graph = step_graph(plan.layout, schedule.groups, trainable)
        orders = [
            order_tasks(plan, graph, schedule.groups),
            order_tasks(plan, graph, schedule.groups, partial(priced.task_s, plan, schedule)),
        ]
        took_s = [
            simulate_step(plan, replace(schedule, order=o), priced, trainable).makespan_s
            for o in orders
        ]
        ordered = with_order(plan, schedule, priced, trainable)
        assert ordered.order in orders
        assert ordered.makespan_s == pytest.approx(min(took_s), rel=1e-8, abs=1e-12)
        assert ordered.makespan_s == simulate_step(plan, ordered, priced, trainable).makespan_s


def test_rounding_decides_nothing():
    """Orders that take the same time but for the last bits: the textbook's, always."""
    plan = graph("a", "b", edges=["ab"])
    schedule = batch(plan, 6)
    seconds = {("a0", FORWARD): 0.1, ("a0", BACKWARD): 0.3, ("b0", BACKWARD): 0.7}
    first = with_order(plan, schedule, prices(plan, seconds), names(plan)).order
    rng = np.random.default_rng(0)
    for _ in range(20):
        moved = {k: v * (1 + rng.choice([-1, 0, 1]) * 2.0**-52) for k, v in seconds.items()}
        assert with_order(plan, schedule, prices(plan, moved), names(plan)).order == first


@pytest.mark.parametrize("n_groups", [0, 1])
def test_nothing_to_order(n_groups):
    plan = chain(2, sources=1)
    schedule = batch(plan, n_groups)
    ordered = with_order(plan, schedule, same_prices(plan, 1.0, 2.0, 3.0), names(plan))
    assert ordered.makespan_s == 6.0 * n_groups
    assert len(ordered.order) == 3 * n_groups + 4
    assert isinstance(ordered, Schedule)
