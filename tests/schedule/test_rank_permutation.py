"""Names of ranks against every permutation, and what a run's schedules move between nodes."""

from itertools import permutations

import numpy as np
import pytest

from dflop_jax.records import (
    Bucket,
    Edge,
    Layout,
    Load,
    Plan,
    Price,
    Prices,
    ProgramId,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    crossing_traffic,
    home_ranks,
    rank_nodes,
    rank_traffic,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.rank_permutation import (
    RankDevices,
    best_permutation,
    exchange_rooms,
    local_tokens,
    nearest_slots,
    tokens_read,
)

EDGE = Edge("sight", "words", "seen")


def crossed_by_loops(moved, names, here, there):
    """(between nodes, between devices of a node) by loops."""
    far = near = 0
    for p, r in enumerate(names):
        for q in range(moved.shape[1]):
            a, b = here.of_rank[p], there.of_rank[q]
            far += moved[r, q] * (a // here.node != b // here.node)
            near += moved[r, q] * (a // here.node == b // here.node and a != b)
    return far, near


@pytest.mark.parametrize("seed", range(12))
def test_best_permutation_is_optimal(seed):
    rng = np.random.default_rng(seed)
    low, high, node = (int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    moved = rng.integers(0, 9, (low, high)) * (rng.random((low, high)) < 0.6)
    here = RankDevices(np.arange(low), node)
    there = RankDevices(rng.integers(0, low, high), node)
    names = best_permutation(local_tokens(moved, here, there))
    assert sorted(names) == list(range(low))
    every = [crossed_by_loops(moved, p, here, there) for p in permutations(range(low))]
    assert crossed_by_loops(moved, names, here, there) == min(every)


def test_best_permutation_defaults_to_the_identity():
    moved = np.zeros((4, 4), int)
    devices = RankDevices(np.arange(4), 2)
    assert best_permutation(local_tokens(moved, devices, devices)).tolist() == [0, 1, 2, 3]


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


def plan_of(low, high, node=0, devices=8):
    """Two modules on the same devices with so many data ranks."""
    meshes = (
        SubmeshPlan("s", 0, 1, low, devices // low),
        SubmeshPlan("w", 0, 1, high, devices // high),
    )
    segments = (
        SegmentPlan("s", "sight", 0, 1, "s", True, True),
        SegmentPlan("w", "words", 0, 1, "w", True, True),
    )
    bucket = Bucket.from_shapes({"sight": Shape(16 // low, 16), "words": Shape(8 // high, 128)})
    return Plan("test", Layout(meshes, segments, (bucket,), edges=(EDGE,)), Scheduling(node=node))


def batch(seed, n=12):
    rng = np.random.default_rng(seed)
    tiles, text = rng.integers(0, 4, n), rng.integers(50, 128, n)
    return [Load({"sight": (16,) * int(k), "words": (int(t),)}) for k, t in zip(tiles, text)]


def prices_of(plan, pair_s):
    both = ("forward", "backward")
    programs = {
        ProgramId(s.name, shape, d): Price(1.0, (pair_s if s.module == "words" else 0.0,))
        for s in plan.layout.segments
        for shape in plan.layout.shapes(s.module)
        for d in both
    }
    return Prices(programs)


def moved_by(plan, schedule, loads):
    """[nodes crossed, moved at all] in tokens."""
    total = np.zeros(2)
    for g in schedule.groups:
        for f in g.feeds:
            moved = moved_between(plan, g, schedule.groups[f], loads)
            total += moved.across_nodes, moved.in_node + moved.across_nodes
    return total


def moved_between(plan, source, target, loads):
    n = plan.layout.data_ranks("sight"), plan.layout.data_ranks("words")
    batch = Batch(loads, plan.layout.modules)
    read = tokens_read(("sight", "words"), source.pieces, target.pieces, batch, n)
    return crossing_traffic(read, rank_nodes(plan, "sight"))


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
    assert (got.across_nodes, got.in_node) == (moved[True], moved[False])
    parts = [got.for_target_ranks([d]) for d in range(high)]
    assert sum(p.across_nodes for p in parts) == moved[True]
    assert got.max_amount == max(p.max_amount for p in parts)


@pytest.mark.parametrize("low, high", [(4, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("pair_s", [0.0, 1e-6])
def test_permuted_schedules_cross_fewer_nodes_with_equal_balance(low, high, pair_s, monkeypatch):
    plan = plan_of(low, high, node=4)
    names = tuple(s.name for s in plan.layout.segments)
    near, plain = np.zeros(2), np.zeros(2)
    for seed in range(4):
        loads, prices = batch(seed), prices_of(plan, pair_s)
        one = schedule_batch(loads, plan, prices, names, work=200)
        with monkeypatch.context() as patch:
            for name in ("permute_ranks", "swap_equal_pieces"):
                patch.setattr(f"dflop_jax.schedule.batch_scheduler.{name}", lambda *_: None)
            other = schedule_batch(loads, plan, prices, names, work=200)
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


def test_pieces_that_cannot_stay_are_spread_over_ranks():
    home = np.zeros(16, int)  # all is read on rank 0
    rank = np.repeat(np.arange(4), 4)
    got = rank[nearest_slots(rank, home, np.zeros(4, int))]
    assert np.bincount(got[:4]).tolist() == [4]
    assert np.bincount(got[4:7], minlength=4).tolist() == [0, 1, 1, 1]


def test_missing_modules_and_odd_node_sizes_are_scheduled():
    """Text only; a node that no rank fills, one smaller than a rank, one of every device."""
    texts = [Load({"words": (20,)}) for _ in range(5)]
    for node in (0, 1, 3, 64):
        plan = plan_of(4, 4, node=node)
        names = tuple(s.name for s in plan.layout.segments)
        for loads in (texts, batch(0)):
            schedule = schedule_batch(loads, plan, prices_of(plan, 0.0), names, work=50)
            assert sorted(
                p for g in schedule.groups if g.module == "words" for p in g.pieces.piece_id
            ) == (list(range(len(loads))))
    with pytest.raises(ValueError, match="node"):
        plan.with_scheduling(node=-1)


def test_exchange_buffers_take_most_groups_in_one_round():
    plan = plan_of(4, 4)
    names = tuple(s.name for s in plan.layout.segments)
    batches = [batch(seed) for seed in range(6)]
    prices = prices_of(plan, 0.0)
    schedules = [schedule_batch(b, plan, prices, names, work=50) for b in batches]
    (room,) = exchange_rooms(plan.layout, schedules, batches)
    assert (room.source, room.target) == ("sight", "words")
    needs = []
    for schedule, loads in zip(schedules, batches, strict=True):
        for g in schedule.groups:
            for f in g.feeds:
                moved = moved_between(plan, g, schedule.groups[f], loads)
                needs.append(moved.max_amount / (g.shape.size * g.microbatches))
    rounds = [max(1, int(np.ceil(need / room.share - 1e-9))) for need in needs]
    assert np.mean(np.array(rounds) > 1) <= 0.5
    assert room.share <= max(needs)
    assert plan.layout.exchange_capacity(EDGE, room.source_shape, room.target_shape) is None
    known = plan.with_layout(exchange_capacities=(room,))
    assert known.layout.exchange_capacity(EDGE, room.source_shape, room.target_shape) == room.share
