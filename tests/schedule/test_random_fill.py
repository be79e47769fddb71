"""Groups filled in random orders, against the cheapest of all divisions of small batches."""

from itertools import product

import numpy as np
import pytest

from dflop_jax.records import Load
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, bucket_variants, capacity_of
from dflop_jax.schedule.costs import Ticks, bucket_ticks, group_costs
from dflop_jax.schedule.groups import PackingSpace, greedy_assignment
from dflop_jax.schedule.random_fill import fill_randomly
from tests.schedule.conftest import TILE, bucket, make_plan, make_prices
from tests.schedule.test_bounds import partitions

BUCKETS = (bucket(6, (1, 64)), bucket(3, (2, 40)), bucket(3, (1, 40)))


def space_of(loads, buckets=BUCKETS, speed=1.0):
    plan = make_plan(buckets, {"a": 1, "b": 1})
    prices = make_prices(plan, factor=lambda p: speed if p.segment == "a" else 1.0)
    batch = Batch(loads, capacity_of(plan.layout))
    variants = bucket_variants(plan.layout, batch)
    costs = group_costs(plan.layout, prices, plan.layout.modules)
    return PackingSpace(batch, variants, bucket_ticks(costs, variants))


def holds(bucket, loads):
    """Whether one microbatch holds the samples, by all ways to choose their rows."""
    a, b = bucket.shape("a"), bucket.shape("b")
    if sum(len(x.lengths("a")) for x in loads) > (a.rows if a else 0):
        return False
    for rows in product(range(b.rows), repeat=len(loads)):
        if np.bincount(rows, [x.tokens("b") for x in loads]).max() <= b.tokens:
            return True
    return False


def least_ticks(space, loads):
    """The least ticks of all divisions into groups and all their buckets."""
    chosen = set()
    for parts in partitions(loads):
        able = [[k for k, b in enumerate(space.buckets) if holds(b, p)] for p in parts]
        chosen |= {tuple(sorted(one)) for one in product(*able)}
    counts = [np.bincount(one, minlength=len(space.buckets)) for one in chosen]
    return int(space.ticks.step_ticks(np.array(counts)).min())


def filled(space, work):
    known = greedy_assignment(space, len(BUCKETS))
    return known, fill_randomly(space, len(BUCKETS), known, Budget(work), np.random.default_rng(0))


def test_nearly_always_finds_the_cheapest_groups_of_few_samples():
    rng, found, better = np.random.default_rng(0), 0, 0
    for _ in range(25):
        tiles = rng.integers(0, 4, int(rng.integers(1, 5))).tolist()
        loads = [Load({"a": (TILE,) * t, "b": (int(rng.integers(9, 41)),)}) for t in tiles]
        space = space_of(loads, speed=float(rng.choice([0.3, 1.0, 2.0])))
        known, got = filled(space, 60)
        assert sorted(i for t in got for m in t.microbatches for r in m for i in r) == [
            *range(len(loads))
        ]
        for run in got:
            inside = [loads[i] for m in run.microbatches for row in m for i in row]
            assert holds(space.buckets[run.bucket], inside)
        cost, least = space.cost(got), least_ticks(space, loads)
        assert least <= cost <= space.cost(known)
        found, better = found + (cost == least), better + (cost < space.cost(known))
    assert found >= 23
    assert better > 3


def test_no_samples_and_no_work_leave_what_is_known():
    space = space_of([])
    assert filled(space, 60) == ([], [])
    known, got = filled(space_of([Load({"b": (30,)})] * 9), 0)
    assert got == known


def test_more_samples_than_the_search_of_counts_packs():
    """A mix of both buckets is cheaper than one main bucket with some of the other."""
    rng = np.random.default_rng(1)
    tokens = np.concatenate([rng.integers(45, 120, 57), rng.integers(150, 340, 7)])
    loads = [Load({"a": (TILE,) * max(0, int(n) // 18 - 2), "b": (int(n),)}) for n in tokens]
    space = space_of(loads, (bucket(22, (4, 128)), bucket(32, (1, 352))))
    known = greedy_assignment(space, 2)
    got = fill_randomly(space, 2, known, Budget(60), np.random.default_rng(0))
    assert space.cost(got) < 0.95 * space.cost(known)


@pytest.mark.parametrize("counts, ticks", [([0, 0], 0), ([2, 0], 13), ([1, 1], 11), ([0, 3], 22)])
def test_a_step_takes_its_busiest_resource_and_the_fastest_fill(counts, ticks):
    costs = Ticks(np.array([[5, 3], [1, 7]]))
    assert costs.step_ticks(np.array([counts])).tolist() == [ticks]
