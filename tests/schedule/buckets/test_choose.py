"""Bucket choice: the MILP against exhaustive choice, the limits it promises, the baseline's."""

import doctest
import itertools

import numpy as np
import pytest

from dflop_jax.records import Bucket, Edge, Load, Shape
from dflop_jax.schedule import arrival_buckets, choose_buckets, oversize
from dflop_jax.schedule.batch import DRIFT, Batch, Capacity, drifted_batches
from dflop_jax.schedule.buckets import milp
from dflop_jax.schedule.buckets.choose import dominating_loads
from dflop_jax.schedule.buckets.milp import (
    GAP,
    SLACKS,
    group_price,
    solve_bucket_milp,
    with_variants,
)
from dflop_jax.schedule.buckets.sizes import oversize_samples, spare_bucket
from dflop_jax.schedule.count_vectors import volume_conditions
from tests.benchmarks.scripts import module
from tests.schedule.conftest import TILE, bucket, make_batch, make_plan, solve

problems = module("schedule_methods")
RANKS = {"a": 2, "b": 2}
ROWS = {"token_multiple": 32, "piece_tokens": {"a": TILE}}


def problem_of(global_batch=32, ranks=RANKS, *, seconds=None, shared=False, **options):
    """Modules on devices of their own or on shared ones; without seconds they are equally busy."""
    options = ROWS | options
    edges = (Edge("a", "b", "a"),) if "a" in ranks else ()
    layout = problems.whole_modules(
        ranks, edges, shared=shared, group_size=options.pop("group_size", 1)
    )
    return problems.problem_of(layout, seconds or linear_seconds, global_batch, **options)


def linear_seconds(one):
    return {"a": 0.01 * one.tokens("a") / TILE, "b": 0.002 * one.tokens("b") + 0.02}


def quadratic_seconds(one):
    """Attention over a row is dear."""
    shape = one.shape("b")
    long_s = 1e-5 * shape.rows * shape.tokens**2 + 0.01 if shape else 0.0
    return {"a": 0.01 * one.tokens("a") / TILE, "b": long_s}


def test_docstring_example_runs():
    (example,) = doctest.DocTestFinder().find(choose_buckets, globs={})
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0


def exhaustive_objective(candidates, batches, problem, must_hold, slack):
    """The MILP's objective by trying every choice and every count vector."""
    return min(
        objective(candidates, chosen, batches, problem, slack)
        for size in range(1, problem.n_buckets + 1)
        for chosen in itertools.combinations(candidates, size)
        if must_hold.any_can_hold(chosen).all()
    )


def objective(candidates, chosen, batches, problem, slack):
    total = max(group_price(problem, b)[1] for b in chosen)
    parents = with_variants(candidates, batches)
    of_chosen = {candidates.index(b) for b in chosen}
    places = [i for i, found in enumerate(parents.values()) if found & of_chosen]
    columns = list(parents)
    price = [group_price(problem, columns[i])[0] for i in places]
    counts = np.array(list(itertools.product(range(9), repeat=len(places))))
    for batch in batches:
        wanted = volume_conditions(batch, columns)
        met = (counts @ wanted.capacity_DC[:, places].T >= slack * wanted.need_D - 1e-6).all(axis=1)
        total += (counts[met] @ price).min() / len(batches) if met.any() else np.inf
    return total


@pytest.mark.parametrize("seed, shared", [(0, False), (1, True), (2, False)])
def test_bucket_milp_equals_exhaustive_choice(seed, shared, capfd, monkeypatch):
    monkeypatch.setattr(milp, "MAX_NODES", 100_000)
    rng = np.random.default_rng(seed)
    drawn = [make_batch(rng, 12, most_tiles=6, most_tokens=60) for _ in range(2)]
    problem = problem_of(12, {"a": 1, "b": 2}, seconds=linear_seconds, n_buckets=2, shared=shared)
    front = Batch(dominating_loads([*drawn[0], *drawn[1]], ("a", "b")), problem.capacity)
    batches = [Batch(batch, problem.capacity) for batch in drawn]
    candidates = [bucket(t, (1, k)) for t in (0, 6, 12) for k in (64, 128)]
    start = candidates[-1:]
    solved = solve_bucket_milp(candidates, batches, problem, must_hold=front, start=start)
    assert capfd.readouterr() == ("", "")
    assert all(len(buckets) <= 2 for buckets in solved)
    for slack in SLACKS:
        best = exhaustive_objective(candidates, batches, problem, front, slack)
        total = min(objective(candidates, chosen, batches, problem, slack) for chosen in solved)
        assert best * (1 - 1e-6) <= total <= best * (1 + GAP)


def test_milp_finds_row_lengths_of_a_multimodal_distribution():
    """Short and long texts, attention over a row dear: its answers make the choice faster."""
    rng = np.random.default_rng(2)
    lengths = np.where(rng.random(400) < 0.05, 960, np.where(rng.random(400) < 0.5, 40, 250))
    loads = [Load({"b": (int(n),)}) for n in lengths]
    problem = problem_of(64, {"b": 2}, seconds=quadratic_seconds, n_buckets=3)
    alone = choose_buckets(loads, problem, effort="quick", with_milp=False)
    both = choose_buckets(loads, problem, effort="quick", start=alone)
    assert both.expected_s < 0.99 * alone.expected_s
    assert (alone.method, both.method) == ("a search", "an integer program")
    again = choose_buckets(loads, problem, effort="quick", start=both)
    assert again.expected_s <= both.expected_s


@pytest.fixture(scope="module")
def loads():
    return make_batch(np.random.default_rng(0), 600)


def test_chosen_buckets_keep_limits(loads):
    problem = problem_of(128, max_tokens={"a": 90 * TILE, "b": 1024})
    choice = choose_buckets(loads, problem, effort="quick")
    assert 1 <= len(choice.buckets) <= 4
    for b in choice.buckets:
        assert b.shape("b").tokens % 32 == 0
        assert b.tokens("b") <= 1024
        assert b.shape("a") is None or (b.shape("a").tokens == TILE and b.shape("a").rows <= 90)
    assert not oversize(loads, choice.buckets, problem.capacity)


def test_sample_above_the_memory_limit_is_refused(loads):
    with pytest.raises(ValueError, match="of b, memory allows 64: drop or truncate"):
        choose_buckets(loads, problem_of(8, max_tokens={"b": 64}))


def test_arrival_buckets_follow_quantiles(loads):
    found = arrival_buckets(loads, RANKS, 3, n_buckets=3, **ROWS)
    assert 1 <= len(found) <= 3
    assert all(b.shape("b").rows == 3 and b.shape("b").tokens % 32 == 0 for b in found)
    assert found[0].shape("b").tokens >= max(s.tokens("b") for s in loads)
    assert found[0].shape("a").rows >= 3 * max(len(s.lengths("a")) for s in loads)
    assert all(x.tokens("b") >= y.tokens("b") for x, y in itertools.pairwise(found))
    single = [Load({"a": (TILE,) * 2, "b": (13,)})]
    one = arrival_buckets(single, {"a": 1, "b": 1}, 1, **ROWS)
    assert one == (bucket(2, (1, 32)),)


def test_spare_bucket_is_minimal():
    rng = np.random.default_rng(0)
    for _ in range(20):
        pieces = [tuple(rng.integers(1, 90, rng.integers(1, 9)).tolist()) for _ in range(5)]
        loads = [Load({"a": a, "b": (int(rng.integers(1, 300)),)}) for a in pieces]
        spare = spare_bucket(loads, Capacity(RANKS), {}, 32)
        plan = make_plan((spare,), RANKS)
        assert oversize_samples(loads, plan) == []
        for m, shape in spare.shapes:
            assert shape.tokens % 32 == 0
            assert shape.tokens - 32 < max(max(load.lengths(m)) for load in loads)
            if shape.rows > 1:
                less = {**dict(spare.shapes), m: Shape(shape.rows - 1, shape.tokens)}
                assert oversize_samples(loads, make_plan((Bucket.from_shapes(less),), RANKS))


@pytest.mark.parametrize("grouping", ["balanced", "arrival"])
def test_only_oversize_samples_run_in_the_spare_bucket(grouping):
    small = bucket(2, (1, 64))
    loads = [Load({"a": (TILE,), "b": (20,)})] * 6 + [Load({"a": (TILE,) * 9, "b": (200,)})]
    plan = make_plan((small,), RANKS, grouping=grouping)
    assert oversize_samples(loads, plan) == [6]
    ranks = RANKS if grouping == "balanced" else dict.fromkeys(RANKS, 1)
    spare = spare_bucket([loads[6]], Capacity(ranks), {"a": TILE}, 32)
    plan = make_plan((small, spare), RANKS, grouping=grouping)
    assert oversize_samples(loads, plan) == []
    schedule = solve(loads, plan)
    shapes = [g.shape for g in schedule.groups if g.module == "b"]
    assert shapes.count(spare.shape("b")) == 1
    assert small.shape("b") in shapes


DRAWN = [Load({"a": (256,) * n, "b": (10 * n + 20 * (n % 3) + 1,)}) for n in range(40)]
MODULES = ("a", "b")


def test_drifted_batches_alternate_in_direction():
    batches = drifted_batches(DRAWN, MODULES, 4000, 20)
    for m in MODULES:
        each = np.array([load.tokens(m) for load in DRAWN])
        means = np.array([np.mean([load.tokens(m) for load in b]) for b in batches])
        moved = (means - each.mean()) / each.std()
        assert (np.abs(moved) < 3 * DRIFT).all()
        assert np.abs(moved).max() > DRIFT / 2
        assert (moved[::2] * moved[1::2]).mean() < 0  # the other way in every second
        assert abs(moved.mean()) < DRIFT / 4
