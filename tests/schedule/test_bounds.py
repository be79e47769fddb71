"""Lower bounds of a batch's step time against the fastest of all schedules of small batches."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Load,
    Schedule,
    SendId,
    Task,
)
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.bounds import lower_bound_s
from dflop_jax.simulate.numbered_tasks import list_schedule
from dflop_jax.simulate.steps import makespan_function
from tests.schedule.conftest import TILE, bucket, make_plan, make_prices, program_of, solve
from tests.schedule.test_order_search import least_makespan, numbered
from tests.simulate.cases import group

BUCKETS = (bucket(6, (1, 64)), bucket(3, (1, 64)), bucket(3, (1, 40)))


def partitions(items):
    """Every division of a list into sets."""
    if not items:
        yield []
        return
    for some in partitions(items[1:]):
        yield [[items[0]], *some]
        for k, part in enumerate(some):
            yield [*some[:k], [items[0], *part], *some[k + 1 :]]


def schedules_of(loads):
    """The schedules of a batch that differ in their shapes, without an order."""
    seen = set()
    for parts in partitions(loads):
        need = [
            (sum(x.tokens("a") // TILE for x in p), sum(x.tokens("b") for x in p)) for p in parts
        ]
        able = [
            {(b.shape("a") if tiles else None, b.shape("b")) for b in BUCKETS
             if b.shape("a").rows >= tiles and b.shape("b").tokens >= tokens}
            for tiles, tokens in need
        ]  # fmt: skip
        seen |= {tuple(sorted(shapes, key=str)) for shapes in product(*able)}
    for shapes in sorted(seen, key=str):
        groups = []
        for a, b in shapes:
            groups += [group("a", a, (len(groups) + 1,))] if a else []
            groups.append(group("b", b))
        yield Schedule(0, tuple(groups))


@pytest.mark.parametrize("seed", range(100))
def test_no_schedule_beats_the_bound(seed):
    """Of all groups and, where cores are not shared, all orders; with sends and step ends, one or
    the other module the slower one, some batches with samples without tiles."""
    rng = np.random.default_rng(seed)
    plan, modules = make_plan(BUCKETS, {"a": 1, "b": 1}), ("a", "b")
    speed = float(rng.choice([0.3, 1.0, 2.0]))
    prices = make_prices(plan, factor=lambda p: speed if p.segment == "a" else 1.0)
    sent = {SendId("a", "b", b.shape("b"), d): 0.003 for b in BUCKETS for d in (FORWARD, BACKWARD)}
    step_end = {Task(m, NO_GROUP, d): 0.004 for m in modules for d in (REDUCE, UPDATE)}
    concurrency = float(rng.choice([1.0, 1.3, 1.7])) if seed % 3 == 0 else np.inf
    prices = replace(prices, sends=sent, step_end=step_end, concurrency=concurrency)
    tiles = rng.integers(0, 4, int(rng.integers(1, 4)))
    loads = [Load({"a": (TILE,) * t, "b": (int(rng.integers(9, 33)),)}) for t in tiles.tolist()]
    got = solve(loads, plan, prices, work=400, program=program_of(plan))
    bound_s = lower_bound_s(Batch(loads, capacity_of(plan.layout)), plan.layout, prices, modules)
    assert 0 < bound_s <= got.makespan_s * (1 + 1e-9)
    assert got.integer_bound_s > 0
    best_s = np.inf
    for schedule in schedules_of(loads):
        ordered, tasks, problem, _ = numbered(plan, schedule, prices, modules)
        if seed % 3:
            any_order = replace(problem, max_live=(len(loads), len(loads)))
            best_s = min(best_s, least_makespan(any_order) * problem.tick_s)
        else:
            makespan_s = makespan_function(plan, ordered, tasks, prices)
            keys = rng.integers(0, 99, (8, problem.n_tasks)).tolist()
            best_s = min(best_s, *(makespan_s(list_schedule(problem, k)) for k in keys))
    assert max(bound_s, got.integer_bound_s) <= best_s * (1 + 1e-7)
    assert not seed % 3 or got.makespan_s >= best_s * (1 - 1e-7)
