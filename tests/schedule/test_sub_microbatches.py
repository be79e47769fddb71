"""Several groups of a module that feed one, or read one: every piece once, as few groups as its
data needs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import NO_GROUP, REDUCE, UPDATE, Load, Schedule, Task, first_piece_numbers
from dflop_jax.schedule.batch import Batch, capacity_of, merge_sub_microbatches
from dflop_jax.schedule.bounds import lower_bound_s
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import check_order
from tests.rows import group_of_rows
from tests.schedule.conftest import (
    TILE,
    bucket,
    check,
    make_batch,
    make_plan,
    make_prices,
    program_of,
    solve,
)


def divided_plan(tiles, fan_in, *, ranks=None, shared=("a", "b"), tokens=(256, 128), divided="a"):
    """Up to `fan_in` groups of so many tiles on each rank feed a row of text, or read one row of
    tiles."""
    buckets = [bucket(tiles, (1, n)) for n in (tokens if divided == "a" else tokens[1:])]
    plan = replace(make_plan(buckets, ranks, shared=shared), policy="dip")
    readers = ("b",) if divided == "b" else ()
    return plan.with_layout(fan_in=fan_in, divided_readers=readers)


@pytest.mark.parametrize("divided", ["a", "b"])
@pytest.mark.parametrize("seed", range(5))
def test_sub_microbatches_hold_every_piece_once_in_one_shape(divided, seed):
    """Of encoders that feed one group in parts, and of readers in parts, each of which reads the
    group that holds the tiles of its samples."""
    rng = np.random.default_rng(seed)
    loads = make_batch(rng, int(rng.choice([1, 7, 30, 60])))
    a, b = (int(x) for x in rng.integers(1, 4, 2))
    tiles = -(-12 // a // 3) + 1 if divided == "a" else -(-40 // a)
    plan = divided_plan(tiles, 3, ranks={"a": a, "b": b}, divided=divided)
    assert plan.layout.divided == (divided,)
    program = program_of(plan) if divided == "b" else None
    got = solve(loads, plan, work=300, program=program)
    check_order(step_graph(plan.layout, got.groups, plan.layout.modules), got.order)
    assert {g.shape for g in got.groups if g.module == divided} <= set(
        plan.layout.shapes(divided)[:1]
    )
    if divided == "a":
        parts = [len(got.feeders(i, "a")) for i, g in enumerate(got.groups) if g.module == "b"]
        greedy = solve(loads, plan, work=0)
        assert got.makespan_s <= greedy.makespan_s * (1 + 1e-9)
    else:
        parts = [len(g.feeds) for g in got.groups if g.module == "a"]
        assert len(loads) < 60 or max(parts) > 1
        first = {m: first_piece_numbers(loads, m) for m in plan.layout.modules}
        owner = {m: np.repeat(np.arange(len(loads)), np.diff(first[m])) for m in first}
        for g in (g for g in got.groups if g.module == "a"):
            texts = {owner["b"][p] for f in g.feeds for p in got.groups[f].pieces.piece_id}
            assert {owner["a"][p] for p in g.pieces.piece_id} <= texts
    assert max(parts, default=0) <= plan.layout.fan_in
    again = solve(loads, plan, work=300, program=program)
    assert got == replace(again, elapsed_s=got.elapsed_s)


@pytest.mark.parametrize("tiles, groups", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3)])
def test_number_of_sub_microbatches_follows_the_data(tiles, groups):
    """On one rank, groups of four tiles: one sample of so many and one of text."""
    plan = divided_plan(4, 3, ranks={"a": 1, "b": 1})
    loads = [Load({"a": (TILE,) * tiles, "b": (60,)}), Load({"b": (40,)})]
    got = solve(loads, plan)
    assert Counter(g.module for g in got.groups)["a"] == groups


def test_sample_larger_than_all_parts_is_refused():
    plan = divided_plan(4, 3, ranks={"a": 1, "b": 1})
    with pytest.raises(ValueError, match=r"13 pieces.*does not hold it"):
        solve([Load({"a": (TILE,) * 13, "b": (60,)})], plan)
    two = plan.with_layout(buckets=(bucket(4, (1, 256)), bucket(8, (1, 256))))
    with pytest.raises(ValueError, match=r"in shapes 4x16, 8x16; give the module one shape"):
        merge_sub_microbatches(two, make_prices(two))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("divided", ["a", "b", None])
def test_no_random_schedule_beats_the_lower_bound(divided, seed):
    """The bounds are below random packings on own and shared devices, with prices of content, step
    end and shared cores; "optimal" is true; and the schedule is near the best of them."""
    rng = np.random.default_rng(seed)
    shared = ("a", "b")[: 2 * (seed % 2)]
    plan = divided_plan(
        9 if divided == "b" else 3,
        2 if divided else 1,
        ranks={"a": 1, "b": 1},
        shared=shared,
        divided=divided or "a",
    )
    prices = make_prices(plan, pair_s=2e-6 * (seed > 1))
    if seed > 1:
        end_s = {Task(s, NO_GROUP, d): 0.004 for s in plan.layout.modules for d in (REDUCE, UPDATE)}
        prices = replace(prices, concurrency=1.5, step_end=end_s)
    loads = [Load({"a": (TILE,) * int(t), "b": (int(n),)} if t else {"b": (int(n),)})
             for t, n in zip(rng.integers(0, 4, 5), rng.integers(20, 90, 5))]  # fmt: skip
    got = solve(loads, plan, prices, work=1000, program=program_of(plan))
    wide, wide_prices = merge_sub_microbatches(plan, prices)
    bound_s = lower_bound_s(
        Batch(loads, capacity_of(plan.layout)), wide.layout, wide_prices, plan.layout.modules
    )
    assert 0 < bound_s <= got.makespan_s * (1 + 1e-9)
    proved_s = max(bound_s, got.integer_bound_s)
    assert got.integer_bound_s > 0
    assert got.lower_bound_s == pytest.approx(min(proved_s, got.makespan_s))
    for _ in range(40):
        other = made_by_hand(rng, loads, plan)
        if other is not None:
            check(other, loads, plan)
            made_s = simulate_step(plan, other, prices, plan.layout.modules).makespan_s
            assert proved_s <= made_s * (1 + 1e-9)
            assert got.makespan_s <= made_s * 1.1
            assert got.status != "optimal" or got.makespan_s <= made_s * (1 + 1e-6)


def made_by_hand(rng, loads, plan):
    """A schedule of random groups: samples in a random order, cut at random, with as many groups of
    tiles or of text as they need, of one or two samples each; None if some do not fit."""
    first = {m: first_piece_numbers(loads, m) for m in plan.layout.modules}
    tile_shape, reads = plan.layout.shapes("a")[0], plan.layout.divided == ("b",)
    groups = []
    cuts = np.split(rng.permutation(len(loads)), sorted(rng.integers(0, len(loads) + 1, 2)))
    for samples in filter(len, cuts):
        each = int(rng.integers(1, 3)) if reads else len(samples)
        texts = [samples[k : k + each] for k in range(0, len(samples), each)]
        tiles = [p for i in samples for p in range(first["a"][i], first["a"][i + 1])]
        n_tiles = tile_shape.rows
        feeding = [tiles[k : k + n_tiles] for k in range(0, len(tiles), n_tiles)]
        longest = max(sum(loads[i].tokens("b") for i in text) for text in texts)
        shape = next((s for s in sorted(plan.layout.shapes("b")) if s.tokens >= longest), None)
        limits = (1, plan.layout.fan_in) if reads else (plan.layout.fan_in, 1)
        if shape is None or len(feeding) > limits[0] or len(texts) > limits[1]:
            return None
        fed = tuple(len(groups) + len(feeding) + k for k in range(len(texts)))
        for part in feeding:
            rows = tuple((p,) for p in part) + ((),) * (n_tiles - len(part))
            groups.append(group_of_rows("a", tile_shape, ((rows,),), fed, (len(part) * TILE**2,)))
        for text in texts:
            row = tuple(sorted(first["b"][i] for i in text))
            pairs = sum(loads[i].tokens("b") ** 2 for i in text)
            groups.append(group_of_rows("b", shape, (((row,),),), (), (pairs,)))
    return Schedule(0, tuple(groups))
