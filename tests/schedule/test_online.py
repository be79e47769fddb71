"""Schedules of global batches: every sample once, within capacity, against plain enumeration."""

import itertools

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, Bucket, SampleShape, Task
from dflop_jax.schedule import BucketCosts, Capacity, oversize, pipeline_makespan, schedule_batch
from dflop_jax.schedule.costs import overlapped_makespan
from dflop_jax.schedule.cover import Demand, cheap_covers, demand
from dflop_jax.sim.pipeline import simulate_step
from tests.schedule.conftest import make_batch, make_costs, make_plan


def check(schedule, shapes, plan):
    """The invariants of any schedule."""
    assert sorted(schedule.samples) == list(range(len(shapes)))
    ranks = plan.data_ranks("llm")
    vision = plan.data_ranks("vision") if "vision" in plan.modules else 0
    for group in schedule.groups:
        assert len(group) == plan.group_size
        assert len({m.bucket for m in group}) == 1
        for m in group:
            bucket = plan.buckets[m.bucket]
            assert len(m.rows) == ranks
            assert all(len(rank) == bucket.rows for rank in m.rows)
            for row in itertools.chain(*m.rows):
                assert sum(shapes[i].llm_tokens for i in row) <= bucket.tokens
            if vision:
                assert sum(shapes[i].tiles for i in m.samples) <= bucket.tiles * vision
    assert schedule.lower_bound_s <= schedule.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(25))
def test_every_sample_once_over_random_plans(seed):
    rng = np.random.default_rng(seed)
    shapes = make_batch(rng, int(rng.choice([0, 1, 2, 30, 100])))
    vision, llm, group_size = (int(x) for x in rng.integers(0, 4, 3))
    buckets = [Bucket(24, 128), Bucket(12, 192, 2), Bucket(24, 384), Bucket(0, 128, 3)]
    count = int(rng.integers(1, 5))
    keep = {2, *rng.permutation(4)[:count].tolist()}
    plan = make_plan([buckets[i] for i in sorted(keep)], vision, llm + 1, group_size + 1)
    schedule = schedule_batch(shapes, plan, make_costs(plan), max_rounds=600, time_limit_s=60.0)
    check(schedule, shapes, plan)
    greedy = schedule_batch(shapes, plan, make_costs(plan), max_rounds=0)
    check(greedy, shapes, plan)
    assert schedule.makespan_s <= greedy.makespan_s * (1 + 1e-9)


def test_same_arguments_give_the_same_schedule(small_plan):
    shapes = make_batch(np.random.default_rng(0), 80)
    costs = make_costs(small_plan)
    first, second = (
        schedule_batch(shapes, small_plan, costs, step=3, time_limit_s=60.0) for _ in range(2)
    )
    assert first.groups == second.groups
    assert first.step == 3


def packs(shapes, buckets, vision, llm):
    """Whether the samples pack into these microbatches, by plain recursion."""
    tokens = [[b.tokens] * llm * b.rows for b in buckets]
    tiles = [b.tiles * vision for b in buckets]

    def place(i):
        if i == len(shapes):
            return True
        s = shapes[i]
        for m in range(len(buckets)):
            if tiles[m] < s.tiles:
                continue
            for row in range(len(tokens[m])):
                if tokens[m][row] >= s.llm_tokens:
                    tokens[m][row] -= s.llm_tokens
                    tiles[m] -= s.tiles
                    if place(i + 1):
                        return True
                    tokens[m][row] += s.llm_tokens
                    tiles[m] += s.tiles
        return False

    return place(0)


def cheapest(shapes, plan, costs):
    """Least makespan over all sets of at most 7 of each bucket, by plain enumeration."""
    orders = []
    for counts in itertools.product(range(8), repeat=len(plan.buckets)):
        chosen = [b for b, n in enumerate(counts) for _ in range(n)]
        chosen.sort(key=lambda b: sum(costs.seconds[b]) - max(costs.seconds[b]))
        orders.append((pipeline_makespan([costs.seconds[b] for b in chosen]), chosen))
    tokens, tiles = sum(s.llm_tokens for s in shapes), sum(s.tiles for s in shapes)
    for makespan_s, chosen in sorted(orders):
        held = [plan.buckets[b] for b in chosen]
        room = (
            2 * sum(b.tokens * b.rows for b in held) >= tokens
            and sum(b.tiles for b in held) >= tiles
        )
        if room and packs(shapes, held, 1, 2):
            return makespan_s
    raise AssertionError("nothing packs")


@pytest.mark.parametrize("several_rows", [False, True])
def test_small_batches_are_as_cheap_as_plain_enumeration(several_rows):
    """The bound always holds, "optimal" is never said wrongly, and the optimum is rarely missed
    (packing is a heuristic)."""
    buckets = [Bucket(6, 128), Bucket(6, 64), Bucket(3, 64)]
    if several_rows:
        buckets[0] = Bucket(6, 64, 2)
    plan = make_plan(buckets, vision=1, llm=2)
    costs = make_costs(plan)
    met = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = zip(rng.integers(0, 6, 7), rng.integers(10, 60, 7))
        shapes = [SampleShape(int(t), 1, int(k)) for t, k in sizes]
        best_s = cheapest(shapes, plan, costs)
        got = schedule_batch(shapes, plan, costs, time_limit_s=60.0)
        check(got, shapes, plan)
        assert got.lower_bound_s <= best_s * (1 + 1e-9)
        assert got.makespan_s >= best_s * (1 - 1e-9)
        if got.status == "optimal":
            assert got.makespan_s == pytest.approx(best_s)
        met += got.makespan_s <= best_s * (1 + 1e-9)
    assert met >= 18


@pytest.mark.parametrize("seed", range(10))
def test_cheap_covers_are_all_the_covers(seed):
    rng = np.random.default_rng(seed)
    room = rng.integers(0, 5, (4, 3)).astype(float)
    need = rng.integers(0, 15, 4).astype(float)
    cost = rng.integers(1, 6, 3).astype(float)
    ceiling = 20.0
    found, complete = cheap_covers(Demand(room, need), cost, ceiling)
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
def test_every_packing_meets_the_demand(seed):
    """Conditions are necessary: what a random packing holds never breaks them."""
    rng = np.random.default_rng(seed)
    buckets = [Bucket(5, 100), Bucket(3, 60, 2), Bucket(0, 100)]
    capacity = Capacity(2, 3)
    counts = rng.integers(0, 4, 3)
    shapes = []
    for bucket, count in zip(buckets, counts):
        for _ in range(count):
            tiles = bucket.tiles * 2
            for _ in range(3 * bucket.rows):
                tokens = bucket.tokens
                while tokens > 0 and rng.random() < 0.9:
                    k, t = int(rng.integers(1, tokens + 1)), int(rng.integers(0, tiles + 1))
                    shapes.append(SampleShape(t, 0, k))
                    tokens, tiles = tokens - k, tiles - t
    wanted = demand(shapes, buckets, capacity)
    assert (wanted.room_DC @ counts >= wanted.need_D - 1e-6).all()


def test_text_only_microbatches_use_the_bucket_without_tiles():
    shapes = [SampleShape(0, 60, 60)] * 8
    plan = make_plan([Bucket(8, 128), Bucket(0, 128)])
    schedule = schedule_batch(shapes, plan, make_costs(plan))
    check(schedule, shapes, plan)
    assert {m.bucket for g in schedule.groups for m in g} == {1}
    assert schedule.status == "optimal"


def test_empty_microbatches_pad_a_group():
    plan = make_plan([Bucket(8, 128)], group_size=4)
    schedule = schedule_batch([SampleShape(1, 5, 9)], plan, make_costs(plan))
    check(schedule, [SampleShape(1, 5, 9)], plan)
    assert [len(m.samples) for m in schedule.groups[0]] == [1, 0, 0, 0]


def test_oversize_sample_is_named_with_the_choices(small_plan):
    shapes = [SampleShape(1, 5, 9), SampleShape(2, 300, 308)]
    with pytest.raises(ValueError, match=r"sample 1 .*308.*16x1x256.*drop or truncate.*bigger"):
        schedule_batch(shapes, small_plan, make_costs(small_plan))
    assert oversize(shapes, small_plan.buckets, Capacity(2, 2)) == [1]
    assert oversize([SampleShape(33, 0, 9)], small_plan.buckets, Capacity(2, 2)) == [0]
    assert oversize([SampleShape(33, 0, 9)], small_plan.buckets, Capacity(0, 2)) == []


def test_costs_that_do_not_match_are_refused(small_plan):
    with pytest.raises(ValueError, match="1 buckets for a plan of 4"):
        schedule_batch([], small_plan, BucketCosts(((1.0, 1.0),)))
    with pytest.raises(ValueError, match="3 modules"):
        schedule_batch([], small_plan, BucketCosts(((1.0,) * 3,) * 4))
    with pytest.raises(ValueError, match="one row per bucket"):
        BucketCosts(((1.0, 2.0), (1.0,)))
    with pytest.raises(ValueError, match="finite"):
        BucketCosts(((1.0, -2.0),))


def test_pipeline_makespan_is_steady_state_plus_fill():
    assert pipeline_makespan([]) == 0.0
    assert pipeline_makespan([(2.0, 3.0)]) == 5.0
    assert pipeline_makespan([(2.0, 3.0), (4.0, 1.0)]) == 3.0 + 4.0 + 2.0


@pytest.mark.parametrize("seed", range(20))
def test_overlapped_makespan_is_the_simulators(seed):
    """Against the runtime's own task lists, simulated, where every microbatch has tiles."""
    rng = np.random.default_rng(seed)
    plan = make_plan([Bucket(4, 64), Bucket(2, 128), Bucket(1, 64)], 1, 1)
    rows = [tuple(rng.random(2)) for _ in plan.buckets]
    seconds = {}
    for b, (vision_s, llm_s) in enumerate(rows):
        seconds[Task("vision", b, FORWARD)] = vision_s / 3
        seconds[Task("vision", b, BACKWARD)] = vision_s * 2 / 3
        seconds[Task("llm", b, BACKWARD)] = llm_s
    order = rng.integers(0, 3, seed % 9).tolist()
    trace = simulate_step(plan, order, seconds, ["vision", "llm"])
    assert overlapped_makespan([rows[b] for b in order]) == pytest.approx(trace.makespan_s)


def test_overlapped_makespan_without_tiles_or_encoder():
    assert overlapped_makespan([]) == 0.0
    assert overlapped_makespan([(2.0,), (3.0,)]) == 5.0
    assert overlapped_makespan([(0.0, 2.0), (3.0, 1.0), (0.0, 2.0)]) == 5.0
    assert overlapped_makespan([(0.0, 1.0), (3.0, 1.0)]) == 1.0 + 1.0 + 2.0


def test_a_callers_makespan_decides(small_plan):
    """A simulator that finds the first bucket free must see it chosen."""
    shapes = make_batch(np.random.default_rng(1), 40, most_tiles=8)
    base = make_costs(small_plan)

    def first_is_free(buckets):
        return float(sum(b != 0 for b in buckets)) + 1e-3 * len(buckets)

    costs = BucketCosts(base.seconds, first_is_free)
    schedule = schedule_batch(shapes, small_plan, costs, time_limit_s=60.0)
    check(schedule, shapes, small_plan)
    assert {m.bucket for g in schedule.groups for m in g} == {0}
    assert schedule.makespan_s == pytest.approx(1e-3 * len(schedule.groups))


@pytest.mark.parametrize("n", [0, 1, 7, 33])
@pytest.mark.parametrize("vision", [0, 2])
@pytest.mark.parametrize("group_size", [1, 2])
def test_arrival_keeps_order_and_takes_the_smallest_bucket(n, vision, group_size):
    """Against the rule in plain loops: one sample a row, two ranks of three rows."""
    shapes = make_batch(np.random.default_rng(n), n)
    buckets = [Bucket(36, 128, 3), Bucket(12, 64, 3), Bucket(4, 32, 3)]
    plan = make_plan(buckets, vision, 2, group_size, "arrival")
    costs = make_costs(plan)
    schedule = schedule_batch(shapes, plan, costs)
    check(schedule, shapes, plan)
    assert list(schedule.samples) == list(range(n))
    assert all(len(row) <= 1 for g in schedule.groups for m in g for rank in m.rows for row in rank)
    assert len(schedule.groups) == -(-n // (6 * group_size))
    for g, group in enumerate(schedule.groups):
        lo = g * 6 * group_size
        held = list(range(lo, min(n, lo + 6 * group_size)))
        longest = max(shapes[i].llm_tokens for i in held)
        by_rank = [held[k : k + 3] for k in range(0, len(held), 3)]
        tiles = max(sum(shapes[i].tiles for i in part) for part in by_rank) if vision else 0
        able = [b for b in buckets if b.tokens >= longest and (not vision or b.tiles >= tiles)]
        smallest = min(able, key=lambda b: b.tokens)
        assert {plan.buckets[m.bucket] for m in group} == {smallest}


def test_arrival_splits_what_no_bucket_holds_together():
    shapes = [SampleShape(4, 1, 20)] * 4
    plan = make_plan([Bucket(4, 32, 2)], 1, 1, grouping="arrival")
    schedule = schedule_batch(shapes, plan, make_costs(plan))
    assert [m.samples for g in schedule.groups for m in g] == [(0,), (1,), (2,), (3,)]


def test_arrival_needs_equal_ranks():
    plan = make_plan([Bucket(4, 32)], 1, 2, grouping="arrival")
    with pytest.raises(ValueError, match="equal data ranks"):
        schedule_batch([SampleShape(1, 1, 5)], plan, make_costs(plan))
