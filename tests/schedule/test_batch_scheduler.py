"""Schedules of global batches: every piece once, within its row, against plain enumeration.

Long because all its cases share the checks of any schedule.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule import Capacity, oversize, quick_schedule, schedule_batch
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.costs import bucket_ticks, group_costs
from dflop_jax.schedule.count_vectors import Conditions, list_covers, volume_conditions
from dflop_jax.schedule.groups import (
    PackingSpace,
    greedy_assignment,
    longest_first_assignment,
    schedule_groups,
)
from dflop_jax.schedule.packing import first_fit
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import check_order
from tests.rows import rows_of
from tests.schedule.conftest import TILE, bucket, check, make_batch, make_plan, make_prices


def solve(loads, plan, prices=None, **options):
    prices = make_prices(plan) if prices is None else prices
    return schedule_batch(loads, plan, prices, plan.layout.modules, **options)


@pytest.mark.parametrize("seed", range(16))
def test_random_plans_schedule_every_piece_once(seed):
    rng = np.random.default_rng(seed)
    loads = make_batch(rng, int(rng.choice([0, 1, 2, 30, 80])))
    a, b, group_size = (int(x) for x in rng.integers(1, 4, 3))
    buckets = [bucket(24, (1, 128)), bucket(12, (2, 192)), bucket(24, (1, 384))]
    buckets.append(bucket(0, (3, 128)))
    keep = {2, *rng.permutation(4)[: int(rng.integers(1, 5))].tolist()}
    shared = ("a", "b") if seed % 3 == 0 else ()
    plan = make_plan(
        [buckets[i] for i in sorted(keep)], {"a": a, "b": b}, group_size, shared=shared
    )
    prices = make_prices(plan, pair_s=1e-6 * (seed % 2))
    got = solve(loads, plan, prices, work=300)
    check(got, loads, plan)
    check_order(step_graph(plan.layout, got.groups, plan.layout.modules), got.order)
    greedy = solve(loads, plan, prices, work=0)
    check(greedy, loads, plan)
    assert got.makespan_s <= greedy.makespan_s * (1 + 1e-9)
    again = simulate_step(plan, got, prices, plan.layout.modules).makespan_s
    assert got.makespan_s == pytest.approx(again)
    unnamed = quick_schedule(loads, plan, prices, plan.layout.modules, 300).makespan_s
    assert unnamed == pytest.approx(again)  # whichever ranks hold it


@pytest.mark.parametrize("n", [0, 1, 40])
def test_other_module_graphs_schedule_every_piece_once(n):
    """Two sources, a chain whose last module is not the dearest, and pieces of unlike length in a
    source; samples lack any module but the last."""
    rng = np.random.default_rng(n)

    def some(most, length, chance):
        if rng.random() > chance:
            return ()
        return tuple(int(x) for x in rng.integers(length, 3 * length, rng.integers(1, most + 1)))

    loads = [
        Load(
            {
                "a": some(4, 10, 0.6),
                "b": (20,) * int(rng.integers(0, 3)),
                "c": (int(rng.integers(5, 100)),),
            }
        )
        for _ in range(n)
    ]
    sizes = {"a": Shape(2, 64), "b": Shape(4, 20), "c": Shape(1, 128)}
    buckets = [
        Bucket.from_shapes(sizes),
        Bucket.from_shapes(sizes | {"c": Shape(1, 256), "a": Shape(4, 64), "b": Shape(8, 20)}),
    ]
    ranks = {"a": 2, "b": 3, "c": 2}
    for edges in ([("a", "c"), ("b", "c")], [("a", "b"), ("b", "c")]):
        plan = make_plan(buckets, ranks, edges=edges)
        got = solve(loads, plan, make_prices(plan, pair_s=1e-6), work=500)
        check(got, loads, plan)


@pytest.mark.parametrize("seed", range(12))
def test_buckets_with_different_row_counts_lose_no_sample(seed):
    """Many samples take no room in the rows that they are packed into."""
    rng = np.random.default_rng(seed)
    loads = []
    for c in rng.random(30) < 0.4:
        more = {"c": (int(rng.integers(60, 125)),)} if c else {}
        loads.append(Load({"a": (int(rng.integers(10, 60)),), **more}))
    buckets = [Bucket.from_shapes({"a": Shape(3, 64), "c": Shape(1, 128)}),
               Bucket.from_shapes({"a": Shape(6, 64), "c": Shape(3, 128)})]  # fmt: skip
    plan = make_plan(buckets, {"a": 1, "b": 1, "c": 1}, edges=[("a", "c")])
    check(solve(loads, plan, make_prices(plan), work=500), loads, plan)


def test_one_sample_may_span_several_rows_of_the_last_module():
    loads = [Load({"b": (40, 40, 40)}), Load({"b": (60, 20)}), Load({"b": (9,)})]
    plan = make_plan([bucket(0, (1, 64)), bucket(0, (2, 64))], {"b": 2})
    got = solve(loads, plan)
    check(got, loads, plan)


@pytest.mark.parametrize("n", [0, 1, 2, 40])
@pytest.mark.parametrize("seed", range(3))
def test_longest_first_assignment_fills_the_lightest_rank(n, seed):
    """Beside the rule as a plain loop; where the rows have no room in this order, no answer."""
    rng = np.random.default_rng([n, seed])
    lengths = rng.integers(8, 120, n).tolist()
    plan = make_plan([bucket(0, (2, 128))], {"b": 3})
    batch, capacity = Batch([Load({"b": (k,)}) for k in lengths], ("b",)), capacity_of(plan.layout)
    ticks = bucket_ticks(
        group_costs(plan.layout, make_prices(plan, pair_s=1e-6), ("b",)), plan.layout.buckets
    )
    room = PackingSpace(batch, plan.layout.buckets, capacity, ticks, frozenset({"b"}))
    packed = greedy_assignment(room, 1)
    dealt = longest_first_assignment(room, packed, Budget(100))
    assert longest_first_assignment(replace(room, priced=frozenset()), packed, Budget(100)) is None
    if n == 0:
        assert not dealt
        return
    free = {(g, d, r): 128 for g in range(len(packed)) for d in range(3) for r in range(2)}
    content, rows = [0] * 3, {k: [] for k in free}
    for i in sorted(range(n), key=lambda i: -lengths[i]):
        fits = [k for k in free if free[k] >= lengths[i]]
        if not fits:
            assert dealt is None
            return
        k = min(fits, key=lambda k: content[k[1]])
        free[k] -= lengths[i]
        content[k[1]] += lengths[i] ** 2
        rows[k].append(i)
    groups = schedule_groups(room, dealt, plan.layout)
    for g, group in enumerate(groups):
        ((*ranks,),) = rows_of(group, 3)
        assert [[sorted(r) for r in rank] for rank in ranks] == [
            [sorted(rows[g, d, r]) for r in range(2)] for d in range(3)
        ]
    assert [t.bucket for t in dealt] == [t.bucket for t in packed]


def first_fit_by_loops(loads, order, n_rows, row_room, tiles):
    """Rows of each microbatch: a sample goes to the first that has a row and tiles for it."""
    packed = []
    for i in order:
        text, pictures = loads[i].tokens("llm"), len(loads[i].lengths("vision"))
        for rows in packed:
            used = sum(len(loads[j].lengths("vision")) for row in rows for j in row)
            free = [row_room - sum(loads[j].tokens("llm") for j in row) for row in rows]
            fitting = [r for r in range(n_rows) if free[r] >= text]
            if fitting and used + pictures <= tiles:
                rows[fitting[0]].append(i)
                break
        else:
            packed.append([[i], *([] for _ in range(n_rows - 1))])
    return packed


@pytest.mark.parametrize(
    "n, rows, ranks", [(0, 1, 1), (1, 1, 1), (40, 1, 1), (60, 3, 1), (90, 5, 2)]
)
def test_first_fit_equals_a_plain_loop(n, rows, ranks):
    for seed in range(4):
        rng = np.random.default_rng([n, rows, seed])
        loads = [
            Load({"vision": (16,) * int(rng.integers(4)), "llm": (int(rng.integers(1, 101)),)})
            for _ in range(n)
        ]
        bucket = Bucket.from_shapes({"vision": Shape(4, 16), "llm": Shape(rows, 100)})
        capacity = Capacity({"vision": ranks, "llm": ranks})
        batch = Batch(loads, ("vision", "llm"))
        assert n == 0 or batch.anchor == "llm"
        order = rng.permutation(n).tolist()
        got = first_fit(batch, order, bucket, capacity)
        assert got == first_fit_by_loops(loads, order, rows * ranks, 100, 4 * ranks)


def test_last_bits_of_prices_do_not_change_the_schedule(small_plan):
    """As another BLAS would: every price moved by some last bits."""
    loads = make_batch(np.random.default_rng(1), 50)
    rng = np.random.default_rng(2)
    exact = make_prices(small_plan, pair_s=1e-6)
    first = solve(loads, small_plan, exact, work=800)
    for _ in range(3):
        moved = make_prices(
            small_plan, pair_s=1e-6, factor=lambda _: 1 + 4e-16 * int(rng.integers(-3, 4))
        )
        again = solve(loads, small_plan, moved, work=800)
        assert again.groups == first.groups
        assert again.work == first.work


def test_work_stays_within_the_plans_budget(small_plan):
    """Work is counted and ends within the last thing begun; more of it is not worse, but for what
    a group's busiest rank takes on to relieve the step's."""
    loads = make_batch(np.random.default_rng(5), 120)
    prices = make_prices(small_plan, pair_s=2e-6)
    spans = []
    for budget in (200, 1000, 3000):
        got = solve(loads, small_plan.with_scheduling(work_budget=budget), prices)
        assert got.work <= budget + 400
        spans.append(got.makespan_s)
    assert all(more <= less * (1 + 1e-4) for less, more in itertools.pairwise(spans))
    assert solve(loads, small_plan, prices, work=0).work == 0


def test_content_is_balanced_over_ranks_and_groups():
    rng = np.random.default_rng(3)
    lengths = np.minimum(700, rng.lognormal(5, 0.8, 150)).astype(int)
    loads = [Load({"b": (int(n),)}) for n in lengths]
    plan = make_plan([bucket(0, (1, 1024))], {"b": 8})
    even = solve(loads, plan, make_prices(plan, pair_s=1e-7), work=3000)
    blind = solve(loads, plan, make_prices(plan), work=3000)
    check(even, loads, plan)

    def busiest(schedule):
        total = np.zeros(8)
        for g in schedule.groups:
            np.add.at(total, g.pieces.rank, lengths[g.pieces.piece_id] ** 2)
        return total.max() / max((lengths**2).sum() / 8, (lengths**2).max())

    assert len(even.groups) == len(blind.groups)
    assert busiest(even) <= 1.02 < busiest(blind)
    assert sum(g.content[0] for g in even.groups) < sum(g.content[0] for g in blind.groups)


@pytest.mark.parametrize("seed", range(10))
def test_list_covers_lists_every_cheap_cover(seed):
    rng = np.random.default_rng(seed)
    room = rng.integers(0, 5, (4, 3)).astype(float)
    need = rng.integers(0, 15, 4).astype(float)
    cost = rng.integers(1, 6, 3).astype(float)
    ceiling = 20.0
    found, complete = list_covers(Conditions(room, need), cost, ceiling)
    assert complete
    cheap = {
        c
        for c in itertools.product(range(21), repeat=3)
        if (room @ c >= need).all() and cost @ c <= ceiling
    }
    minimal = {  # without the covers that stay covers with one group less
        c
        for c in cheap
        if not any(tuple(np.subtract(c, step)) in cheap for step in np.eye(3, dtype=int))
    }
    got = {tuple(map(int, c)) for c in found}
    assert minimal <= got <= cheap
    spent = found @ cost
    assert (np.diff(spent) >= -1e-9).all()


@pytest.mark.parametrize("buckets, most", [(4, 20_000), (8, 5_000), (20, 800)])
def test_more_buckets_list_fewer_covers(buckets, most):
    """As covers of more buckets take longer each; the cheapest are among them."""
    rng = np.random.default_rng(buckets)
    room = rng.integers(1, 5, (3, buckets)).astype(float)
    need, cost = np.full(3, 60.0), rng.integers(3, 9, buckets).astype(float)
    found, complete = list_covers(Conditions(room, need), cost, 400.0)
    assert complete == (buckets == 4)
    assert 0 < len(found) <= most
    assert (found @ room.T >= need).all()
    holds = optimize.LinearConstraint(room, need)
    least = optimize.milp(cost, constraints=holds, integrality=np.ones(buckets))
    assert (found @ cost)[0] == pytest.approx(least.fun)


@pytest.mark.parametrize("seed", range(30))
def test_every_packing_satisfies_the_volume_conditions(seed):
    """Conditions are necessary: what a random packing holds never breaks them."""
    rng = np.random.default_rng(seed)
    buckets = [bucket(5, (1, 100)), bucket((2, 40), (2, 60)), bucket(0, (1, 100))]
    capacity = Capacity({"a": 2, "b": 3}, 1)
    counts = rng.integers(0, 4, 3)
    loads = []
    for one, count in zip(buckets, counts):
        for _ in range(count):
            shape = one.shape("a")
            free = [shape.tokens] * (2 * shape.rows) if shape else []
            for _ in range(3 * one.shape("b").rows):
                tokens = one.shape("b").tokens
                while tokens > 0 and rng.random() < 0.9:
                    pieces = []
                    for r in rng.permutation(len(free))[: int(rng.integers(0, 3))]:
                        if free[r] >= TILE:
                            pieces.append(int(rng.integers(TILE, free[r] + 1)))
                            free[r] -= pieces[-1]
                    k = int(rng.integers(1, tokens + 1))
                    loads.append(Load({"a": tuple(pieces), "b": (k,)}))
                    tokens -= k
    batch = Batch(loads, ("a", "b"))
    for modules in (None, ["a"], ["b"]):
        wanted = volume_conditions(batch, buckets, capacity, modules, is_bound=True)
        assert (wanted.capacity_DC @ counts >= wanted.need_D - 1e-6).all()


def test_modules_without_pieces_have_no_group():
    """Also where every bucket has the module: that shape is compiled, but nothing runs it."""
    loads = [Load({"b": (60,)})] * 8
    plan = make_plan([bucket(8, (1, 128)), bucket(8, (1, 64))])
    got = solve(loads, plan)
    check(got, loads, plan)
    assert {g.module for g in got.groups} == {"b"}
    assert got.status == "optimal"


def test_oversize_sample_is_named_with_remedies(small_plan):
    loads = [Load({"a": (TILE,), "b": (9,)}), Load({"a": (TILE,) * 2, "b": (308,)})]
    with pytest.raises(ValueError, match=r"sample 1 .*308.*a:16x16.*drop or truncate.*bigger"):
        solve(loads, small_plan)
    both = Capacity({"a": 2, "b": 2})
    assert oversize(loads, small_plan.layout.buckets, both) == [1]
    assert oversize([Load({"a": (TILE,) * 33, "b": (9,)})], small_plan.layout.buckets, both) == [0]
    only = Capacity({"b": 2})
    assert oversize([Load({"a": (TILE,) * 33, "b": (9,)})], small_plan.layout.buckets, only) == []
    assert oversize([Load({"a": (30,)})], [bucket((2, 64), (1, 9))], Capacity({"a": 1})) == []
    assert oversize([Load({"a": (40,) * 3})], [bucket((2, 64), (1, 9))], Capacity({"a": 1})) == [0]


@pytest.mark.parametrize("n", [0, 1, 7, 33])
@pytest.mark.parametrize("with_a", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
def test_arrival_keeps_order_and_uses_the_smallest_bucket(n, with_a, group_size):
    """Against the rule in plain loops: one sample a row, two ranks of three rows."""
    loads = make_batch(np.random.default_rng(n), n)
    ranks = {"a": 2, "b": 2} if with_a else {"b": 2}
    if not with_a:
        loads = [Load({"b": load.lengths("b")}) for load in loads]
    sizes = [(36, (3, 128)), (12, (3, 64)), (4, (3, 32))]
    buckets = [bucket(a if with_a else 0, b) for a, b in sizes]
    plan = make_plan(buckets, ranks, group_size, "arrival")
    got = solve(loads, plan)
    check(got, loads, plan)
    last = [g for g in got.groups if g.module == "b"]
    assert [p for g in last for p in g.pieces.piece_id] == list(range(n))
    assert all(len(row) <= 1 for g in last for m in rows_of(g, 2) for rank in m for row in rank)
    assert len(last) == -(-n // (6 * group_size))
    for g, group in enumerate(last):
        lo = g * 6 * group_size
        members = list(range(lo, min(n, lo + 6 * group_size)))
        longest = max(loads[i].tokens("b") for i in members)
        by_rank = [members[k : k + 3] for k in range(0, len(members), 3)]
        tiles = max(sum(len(loads[i].lengths("a")) for i in part) for part in by_rank)
        able = [b for b in buckets if b.shape("b").tokens >= longest]
        able = [b for b in able if not with_a or b.shape("a").rows >= tiles]
        smallest = min(able, key=lambda b: b.tokens("b"))
        assert group.shape == smallest.shape("b")
        for source in got.fed_by(got.groups.index(group), "a"):
            owner = [i for i, load in enumerate(loads) for _ in load.lengths("a")]
            held = {(m, d, p) for p, m, d, _ in group.pieces.columns.T.tolist()}
            for p, m, d, _ in got.groups[source].pieces.columns.T.tolist():
                assert (m, d, owner[p]) in held


def test_arrival_splits_samples_that_exceed_every_bucket():
    loads = [Load({"a": (TILE,) * 4, "b": (20,)})] * 4
    plan = make_plan([bucket(4, (2, 32))], {"a": 1, "b": 1}, grouping="arrival")
    got = solve(loads, plan)
    assert [g.pieces.piece_id.tolist() for g in got.groups if g.module == "b"] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_arrival_requires_equal_data_ranks():
    plan = make_plan([bucket(4, (1, 32))], {"a": 1, "b": 2}, grouping="arrival")
    with pytest.raises(ValueError, match="equal data ranks"):
        solve([Load({"a": (TILE,), "b": (5,)})], plan)
