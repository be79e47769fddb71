"""Names of ranks against every permutation, and what a run's schedules move between nodes."""

from itertools import permutations

import numpy as np
import pytest

from dflop_jax.records import Load, crossing_traffic, home_ranks, rank_nodes, rank_traffic
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.rank_permutation import (
    best_permutation,
    exchange_capacities,
    local_tokens,
    nearest_slots,
    tokens_read,
)
from tests.schedule.conftest import TILE, bucket, make_plan, make_prices, solve


def crossed_by_loops(moved, names, here, there, node):
    """(between nodes, between devices of a node) by loops."""
    far = near = 0
    for p, r in enumerate(names):
        for q in range(moved.shape[1]):
            a, b = here[p], there[q]
            far += moved[r, q] * (a // node != b // node)
            near += moved[r, q] * (a // node == b // node and a != b)
    return far, near


@pytest.mark.parametrize("seed", range(12))
def test_best_permutation_is_optimal(seed):
    rng = np.random.default_rng(seed)
    low, high, node = (int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    moved = rng.integers(0, 9, (low, high)) * (rng.random((low, high)) < 0.6)
    here, there = np.arange(low), rng.integers(0, low, high)
    names = best_permutation(local_tokens(moved, here, there, node))
    assert sorted(names) == list(range(low))
    every = [crossed_by_loops(moved, p, here, there, node) for p in permutations(range(low))]
    assert crossed_by_loops(moved, names, here, there, node) == min(every)


@pytest.mark.parametrize("seed", range(8))
def test_rank_traffic_equals_plain_loops(seed):
    rng = np.random.default_rng(seed)
    low, high, n = 3, 4, int(rng.integers(0, 9))
    n_p, n_q = (int(k) for k in rng.integers(0, 3 * n + 1, 2))
    sample_P, sample_Q = (rng.integers(0, max(n, 1), k) for k in (n_p, n_q))
    rank_P, rank_Q = rng.integers(0, low, n_p), rng.integers(0, high, n_q)
    amount_P = rng.integers(1, 50, n_p)
    expected = np.zeros((low, high), int)
    for s, v, amount in zip(sample_P, rank_P, amount_P, strict=True):
        for d in {int(d) for t, d in zip(sample_Q, rank_Q, strict=True) if t == s}:
            expected[v, d] += amount
    got = rank_traffic(sample_P, rank_P, amount_P, sample_Q, rank_Q, (low, high))
    np.testing.assert_array_equal(got, expected)


def plan_of(low, high, node=0):
    """Two modules on the same devices with so many data ranks."""
    buckets = [bucket((16 // low, TILE), (8 // high, 128))]
    plan = make_plan(buckets, {"a": low, "b": high}, shared=("a", "b"))
    return plan.with_scheduling(node=node)


def batch(seed, n=12):
    rng = np.random.default_rng(seed)
    tiles, text = rng.integers(0, 4, n), rng.integers(50, 128, n)
    return [Load({"a": (TILE,) * int(k), "b": (int(t),)}) for k, t in zip(tiles, text)]


def traffic_of(plan, schedule, loads):
    """(source group, traffic) of every exchange."""
    packed = Batch(loads, capacity_of(plan.layout))
    for g in schedule.groups:
        for target in (schedule.groups[f] for f in g.feeds):
            read = tokens_read(("a", "b"), g.pieces, target.pieces, packed)
            yield g, crossing_traffic(read, rank_nodes(plan, "a"))


def moved_by(plan, schedule, loads):
    """[nodes crossed, moved at all] in tokens."""
    moved = [m for _, m in traffic_of(plan, schedule, loads)]
    return sum(
        np.array([m.inter_node_amount, m.intra_node_amount + m.inter_node_amount]) for m in moved
    )


@pytest.mark.parametrize("seed", range(8))
def test_crossing_traffic_equals_plain_loops(seed):
    """All that a rank reads from another than its home, by whether their nodes differ."""
    rng = np.random.default_rng(seed)
    low, high = (int(n) for n in rng.integers(1, 7, 2))
    read, node = rng.integers(0, 9, (low, high)), rng.integers(0, 3, low)
    moved = {True: 0, False: 0}
    for v, d in np.ndindex(low, high):
        home = home_ranks(low, high)[d]
        moved[bool(node[v] != node[home])] += read[v, d] * (v != home)
    got = crossing_traffic(read, node)
    assert (got.inter_node_amount, got.intra_node_amount) == (moved[True], moved[False])
    parts = [got.for_target_ranks([d]) for d in range(high)]
    assert sum(p.inter_node_amount for p in parts) == moved[True]
    assert got.max_amount == max(p.max_amount for p in parts)


@pytest.mark.parametrize("low, high", [(4, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("pair_s", [0.0, 1e-6])
def test_permuted_schedules_cross_fewer_nodes_with_equal_balance(low, high, pair_s, monkeypatch):
    plan = plan_of(low, high, node=low // 2)
    prices = make_prices(plan, pair_s)
    near, plain = np.zeros(2), np.zeros(2)
    for seed in range(4):
        loads = batch(seed)
        one = solve(loads, plan, prices, work=200)
        with monkeypatch.context() as patch:
            for name in ("permute_ranks", "swap_equal_pieces"):
                patch.setattr(f"dflop_jax.schedule.batch_scheduler.{name}", lambda *_: None)
            other = solve(loads, plan, prices, work=200)
        assert one.makespan_s == other.makespan_s
        assert [g.content for g in one.groups] == [g.content for g in other.groups]
        near, plain = near + moved_by(plan, one, loads), plain + moved_by(plan, other, loads)
    assert near[0] < plain[0]
    assert near[1] <= plain[1]


@pytest.mark.parametrize("seed", range(12))
def test_nearest_slots_keeps_as_many_pieces_local_as_possible(seed):
    rng = np.random.default_rng(seed)
    n, n_ranks, node = int(rng.integers(0, 30)), int(rng.integers(1, 7)), int(rng.integers(1, 4))
    rank, home = rng.integers(0, n_ranks, n), rng.integers(-1, n_ranks, n)
    node_of = np.arange(n_ranks) // node
    places = nearest_slots(rank, home, node_of)
    assert sorted(places) == list(range(n))
    got, read = rank[places], home >= 0
    for label in (np.arange(n_ranks), node_of):
        kept = (label[got] == label[home])[read].sum()
        most = sum(
            min((label[rank] == v).sum(), (label[home[read]] == v).sum()) for v in set(label)
        )
        assert kept == most


def test_exchange_buffers_take_most_groups_in_one_round():
    plan = plan_of(4, 4)
    batches = [batch(seed) for seed in range(6)]
    schedules = [solve(b, plan, work=50) for b in batches]
    (room,) = exchange_capacities(plan.layout, schedules, batches)
    assert (room.source, room.target) == ("a", "b")
    needs = [
        moved.max_amount / (g.shape.size * g.microbatches)
        for schedule, loads in zip(schedules, batches, strict=True)
        for g, moved in traffic_of(plan, schedule, loads)
    ]
    rounds = [max(1, int(np.ceil(need / room.share - 1e-9))) for need in needs]
    assert np.mean(np.array(rounds) > 1) <= 0.5
    assert room.share <= max(needs)
    between = plan.layout.edges[0], room.source_shape, room.target_shape
    assert plan.layout.exchange_capacity(*between) is None
    known = plan.with_layout(exchange_capacities=(room,))
    assert known.layout.exchange_capacity(*between) == room.share
