"""Schedules of global batches: every piece once, within its row, against plain enumeration."""

import itertools

import numpy as np
import pytest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule import Capacity, oversize, quick_schedule
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.count_vectors import Conditions, list_covers, volume_conditions
from dflop_jax.schedule.packing import first_fit
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import check_order
from tests.rows import rows_of
from tests.schedule.conftest import TILE, bucket, make_batch, make_plan, make_prices, solve


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
    check_order(step_graph(plan.layout, got.groups, plan.layout.modules), got.order)
    greedy = solve(loads, plan, prices, work=0)
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

    loads = []
    for _ in range(n):
        a = rng.integers(10, 30, int(rng.integers(0, 5))).tolist() if rng.random() < 0.6 else ()
        b, c = (20,) * int(rng.integers(0, 3)), int(rng.integers(5, 100))
        loads.append(Load({"a": tuple(a), "b": b, "c": (c,)}))
    sizes = {"a": Shape(2, 64), "b": Shape(4, 20), "c": Shape(1, 128)}
    larger = {"a": Shape(4, 64), "b": Shape(8, 20), "c": Shape(1, 256)}
    buckets = [Bucket.from_shapes(sizes), Bucket.from_shapes(larger)]
    for edges in ([("a", "c"), ("b", "c")], [("a", "b"), ("b", "c")]):
        plan = make_plan(buckets, {"a": 2, "b": 3, "c": 2}, edges=edges)
        solve(loads, plan, make_prices(plan, pair_s=1e-6), work=500)


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
    solve(loads, plan, work=500)


@pytest.mark.parametrize("n, rows, ranks", [(0, 1, 1), (1, 1, 1), (40, 1, 1), (90, 5, 2)])
def test_first_fit_equals_a_plain_loop(n, rows, ranks):
    for seed in range(4):
        rng = np.random.default_rng([n, rows, seed])
        texts, tiles = rng.integers(1, 101, n).tolist(), rng.integers(0, 4, n).tolist()
        loads = [Load({"a": (TILE,) * k, "b": (t,)}) for k, t in zip(tiles, texts)]
        batch = Batch(loads, Capacity({"a": ranks, "b": ranks}))
        assert n == 0 or batch.anchor == "b"
        order, packed = rng.permutation(n).tolist(), []
        for i in order:
            for microbatch in packed:
                used = sum(tiles[j] for row in microbatch for j in row)
                fits = [row for row in microbatch if sum(texts[j] for j in row) + texts[i] <= 100]
                if fits and used + tiles[i] <= 4 * ranks:
                    fits[0].append(i)
                    break
            else:
                packed.append([[i], *([] for _ in range(rows * ranks - 1))])
        assert first_fit(batch, order, bucket(4, (rows, 100))) == packed


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
    blind = solve(loads, plan, work=3000)

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


@pytest.mark.parametrize("seed", range(30))
def test_every_packing_satisfies_the_volume_conditions(seed):
    """Conditions are necessary: what a random packing holds never breaks them."""
    rng = np.random.default_rng(seed)
    buckets = [bucket(5, (1, 100)), bucket((2, 40), (2, 60)), bucket(0, (1, 100))]
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
    batch = Batch(loads, Capacity({"a": 2, "b": 3}))
    for modules in (None, ["a"], ["b"]):
        wanted = volume_conditions(batch, buckets, modules, is_bound=True)
        assert (wanted.capacity_DC @ counts >= wanted.need_D - 1e-6).all()


def test_oversize_sample_is_named_with_remedies(small_plan):
    loads = [Load({"a": (TILE,), "b": (9,)}), Load({"a": (TILE,) * 2, "b": (308,)})]
    with pytest.raises(ValueError, match=r"sample 1 .*308.*a:16x16.*drop or truncate.*larger"):
        solve(loads, small_plan)
    buckets, both = small_plan.layout.buckets, Capacity({"a": 2, "b": 2})
    many = [Load({"a": (TILE,) * 33, "b": (9,)})]
    assert oversize([*loads, *many], buckets, both) == [1, 2]
    assert oversize(many, buckets, Capacity({"b": 2})) == []
    pieces = [Load({"a": (30,)}), Load({"a": (40,) * 3})]
    assert oversize(pieces, [bucket((2, 64), (1, 9))], Capacity({"a": 1})) == [1]


@pytest.mark.parametrize("n", [0, 1, 7, 33])
@pytest.mark.parametrize("with_a", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
def test_arrival_keeps_order_and_uses_the_smallest_bucket(n, with_a, group_size):
    """Against the rule in plain loops: one sample a row, two ranks of three rows."""
    ranks = {"a": 2, "b": 2} if with_a else {"b": 2}
    loads = [
        Load({m: load.lengths(m) for m in ranks})
        for load in make_batch(np.random.default_rng(n), n)
    ]
    sizes = [(36, (3, 128)), (12, (3, 64)), (4, (3, 32))]
    buckets = [bucket(a if with_a else 0, b) for a, b in sizes]
    plan = make_plan(buckets, ranks, group_size, "arrival")
    got = solve(loads, plan)
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
        owner = [i for i, load in enumerate(loads) for _ in load.lengths("a")]
        held = {(m, d, p) for p, m, d, _ in group.pieces.columns.T.tolist()}
        for source in got.feeders(got.groups.index(group), "a"):
            for p, m, d, _ in got.groups[source].pieces.columns.T.tolist():
                assert (m, d, owner[p]) in held
