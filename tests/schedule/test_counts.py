"""The integer program of a batch's counts, against the same program written by hand."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from dflop_jax.records import Bucket, Load, Shape, from_json, to_json
from dflop_jax.schedule import count_solver, schedule_batch
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, bucket_variants, capacity_of
from dflop_jax.schedule.costs import bucket_ticks, group_costs
from dflop_jax.schedule.count_program import CountProgram, ProgramSizes, program_sizes
from dflop_jax.schedule.count_solver import batch_parameters, size_classes
from dflop_jax.schedule.groups import PackingSpace, greedy_assignment
from tests.schedule.conftest import (
    TILE,
    bucket,
    check,
    make_batch,
    make_plan,
    make_prices,
    program_of,
)

PLAN = make_plan(
    [bucket(8, (1, 256)), bucket(2, (1, 256)), bucket(4, (1, 128)), bucket(0, (1, 96))]
)


def room_of(loads, plan, prices):
    batch = Batch(loads, plan.layout.modules)
    buckets = bucket_variants(plan.layout.buckets, batch, 10)
    costs = group_costs(plan.layout, prices, plan.layout.modules)
    return PackingSpace(batch, buckets, capacity_of(plan.layout), bucket_ticks(costs, buckets))


def numbers_for(loads, plan=PLAN):
    prices = make_prices(plan)
    room = room_of(loads, plan, prices)
    known = [t.bucket for t in greedy_assignment(room, 4)]
    known_C = np.bincount(known, minlength=len(room.buckets))
    sizes = program_sizes(plan.layout)
    return (
        batch_parameters(room, plan.layout, prices, plan.layout.modules, sizes, known_C),
        room,
        known_C,
    )


def by_hand(v, sizes):
    """Least objective of the program with these values: variables y, x by rows, first, last, T."""
    c, k, r = sizes.buckets, sizes.classes, sizes.resources
    y, x, first = slice(0, c), slice(c, c + k * c), slice(c + k * c, c + (k + r) * c)
    last, n = slice(first.stop, first.stop + r * c), first.stop + r * c + 1
    where = {"y": y, "x": x, "first": first, "last": last, "T": slice(n - 1, n)}
    rows, lows, highs = [], [], []

    def row(low, high, **parts):
        one = np.zeros(n)
        for place, values in parts.items():
            one[where[place]] += values
        rows.append(one)
        lows.append(low)
        highs.append(high)

    def at(shape, *place, values=1.0):
        array = np.zeros(shape)
        array[place] = values
        return array.ravel()

    for i in range(r):
        row(-np.inf, -v["rest"][i], y=v["work"][i], first=at((r, c), i, values=v["before"][i]),
            last=at((r, c), i, values=v["after"][i]), T=-1.0)  # fmt: skip
        for end in ("first", "last"):
            row(v["busy"][i], v["busy"][i], **{end: at((r, c), i)})
            for j in range(c):
                row(-np.inf, 0, y=-at(c, j) * v["runs_on"][i, j], **{end: at((r, c), i, j)})
    row(-np.inf, -v["shared_rest"][0], y=v["shared"], T=-1.0)
    for need, of_room in zip(v["need"], v["volume"]):
        row(need, np.inf, y=of_room)
    for i in range(k):
        row(v["count"][i], v["count"][i], x=at((k, c), i))
    for m in range(sizes.modules):
        for j in range(c):
            least = at((k, c), slice(None), j, values=v["min_tokens"][m])
            row(-np.inf, 0, x=least, y=-at(c, j) * v["capacity"][m, j])
    upper = np.concatenate(
        [v["max_groups"], v["max_samples"].ravel(), np.full(2 * r * c + 1, np.inf)]
    )
    lower = np.zeros(n)
    lower[-1] = -np.inf
    costs = np.concatenate([v["price"], np.zeros(n - c - 1), [1.0]])
    whole = np.zeros(n)
    whole[y] = 1
    got = milp(costs, constraints=LinearConstraint(np.array(rows), lows, highs),
               bounds=Bounds(lower, upper), integrality=whole)  # fmt: skip
    return got.fun


@pytest.mark.parametrize("seed", range(6))
def test_canonical_program_equals_one_written_by_hand(seed):
    rng = np.random.default_rng(seed)
    numbers, _, known_C = numbers_for(make_batch(rng, [1, 2, 5, 12, 40, 80][seed]))
    sizes, program = program_sizes(PLAN.layout), program_of(PLAN)
    start_C = np.pad(known_C, (0, sizes.buckets - len(known_C)))
    solved, least_s = count_solver._solve(program, numbers, Budget(1e6))
    least = by_hand(numbers.values, sizes)
    assert least_s == pytest.approx(least * numbers.unit_s, rel=2e-3)
    assert least_s <= least * numbers.unit_s
    v, (y, dealt_KC) = numbers.values, solved
    assert (v["volume"] @ y >= v["need"] - 1e-6).all()
    assert (y <= v["max_groups"]).all()
    assert dealt_KC.sum(axis=1) == pytest.approx(v["count"], abs=1e-5)
    assert numbers.lower_bound_s(y) == pytest.approx(least * numbers.unit_s, rel=3e-3)
    assert numbers.lower_bound_s(start_C) >= least_s


def test_program_survives_json():
    program = program_of(PLAN)
    assert from_json(to_json(program), CountProgram) == program


def images_and_clips(rng, n):
    """Samples of a few images, or of many frames with a quarter of the tokens for each."""
    shares = [0.13, 0.38, 0.16, 0.08, 0.08, 0.06, 0.05, 0.03, 0.03]
    frames = rng.choice([0, 2, 3, 4, 5, 7, 9, 24, 32], n, p=shares).tolist()
    extra = rng.integers(1, 4, n).tolist()
    return [
        Load({"a": (TILE,) * f, "b": ((4 if f > 9 else 16) * f + k,)})
        for f, k in zip(frames, extra, strict=True)
    ]


@pytest.mark.parametrize(
    "small, seeds, made_by",
    [(bucket(50, (1, 82)), (5, 6, 7), "local"), (bucket(30, (1, 120)), (0, 6), "integer")],
)
def test_integer_program_never_slows_and_may_speed_up_schedules(small, seeds, made_by):
    """Counts that the local search does not manage to pack are packed from what the program deals
    to them."""
    plan = make_plan([bucket(99, (1, 163)), small], {"a": 1, "b": 7})
    prices = make_prices(plan, factor=lambda p: 0.5 if p.segment == "a" else 1.0)
    for seed in seeds:
        loads = images_and_clips(np.random.default_rng(seed), 64)
        plain, got = (
            schedule_batch(loads, plan, prices, plan.layout.modules, work=800, program=program)
            for program in (None, program_of(plan))
        )
        check(got, loads, plan)
        assert plain.integer_bound_s == 0 < got.integer_bound_s <= got.makespan_s
        assert got.lower_bound_s >= plain.lower_bound_s
        assert got.made_by == made_by
        # Less work is left for the rest.
        assert got.makespan_s <= (0.9 if made_by == "integer" else 1.002) * plain.makespan_s


def test_program_is_not_used_without_work_or_balanced_groups():
    loads = make_batch(np.random.default_rng(0), 12, most_tiles=8)
    options = {"program": program_of(PLAN), "trainable": PLAN.layout.modules}
    greedy = schedule_batch(loads, PLAN, make_prices(PLAN), work=0, **options)
    assert (greedy.made_by, greedy.integer_bound_s) == ("greedy", 0)
    blind = replace(PLAN, scheduling=replace(PLAN.scheduling, grouping="arrival"))
    arrived = schedule_batch(loads, blind, make_prices(PLAN), **options)
    assert (arrived.made_by, arrived.integer_bound_s) == ("arrival", 0)
    nothing = schedule_batch([], PLAN, make_prices(PLAN), **options)
    assert (nothing.groups, nothing.integer_bound_s) == ((), 0)


def test_program_is_not_used_with_too_many_buckets():
    loads = make_batch(np.random.default_rng(0), 12)
    prices = make_prices(PLAN)
    room = room_of(loads, PLAN, prices)
    few = ProgramSizes(buckets=len(room.buckets) - 1, modules=2, resources=2)
    known_C = np.ones(len(room.buckets), int)
    assert batch_parameters(room, PLAN.layout, prices, PLAN.layout.modules, few, known_C) is None


@pytest.mark.parametrize("n, most", [(1, 1), (1, 16), (7, 3), (60, 16), (60, 1)])
def test_size_classes_have_samples_of_the_same_buckets(n, most):
    batch = Batch(make_batch(np.random.default_rng(n), n), ("a", "b"))
    capacity = capacity_of(PLAN.layout)
    able_CN = np.array([batch.can_hold(b, capacity) for b in PLAN.layout.buckets])
    class_N = size_classes(batch, able_CN, most)
    assert sorted(set(class_N.tolist())) == list(range(class_N.max() + 1))
    assert class_N.max() < most
    kinds = len(np.unique(able_CN, axis=1).T)
    if kinds < most:
        for k in range(class_N.max() + 1):
            assert len(np.unique(able_CN[:, class_N == k], axis=1).T) == 1
        sizes = sum(batch.tokens[m] / max(batch.tokens[m].max(), 1) for m in "ab")
        for k in range(class_N.max()):  # by size within a kind
            alike = (able_CN[:, class_N == k][:, 0] == able_CN[:, class_N == k + 1][:, 0]).all()
            assert not alike or sizes[class_N == k].max() <= sizes[class_N == k + 1].min()


def test_bound_needs_every_variant_of_a_bucket():
    """Samples of which none has a piece of a module run without its group, which may be cheaper
    than every bucket of the program."""
    ranks = {"a": 1, "b": 1, "c": 1}
    whole = Bucket.from_shapes({m: Shape(4, TILE) for m in ranks})
    plan = make_plan([whole], ranks)
    prices = make_prices(plan)
    text, picture, sound = ({"c": (5,)}, {"a": (TILE,), "c": (5,)}, {"b": (TILE,), "c": (5,)})

    def bound_s(*kinds):
        loads = [Load(kind) for kind in kinds]
        got = schedule_batch(
            loads, plan, prices, plan.layout.modules, work=500, program=program_of(plan)
        )
        assert got.integer_bound_s <= got.makespan_s
        return got.integer_bound_s

    assert bound_s({**picture, **sound}) > 0
    assert bound_s({**picture, **sound}, text) > 0
    assert bound_s(text, picture) > 0
    # Pictures lack sounds and sounds lack pictures; a group of both lacks nothing, which is known.
    assert bound_s(picture, sound) > 0
    # What lacks {a, b} and what lacks {b, d} may share a group that lacks b alone: not known.
    four = {**ranks, "d": 1}
    plan = make_plan([Bucket.from_shapes({m: Shape(4, TILE) for m in four})], four)
    prices = make_prices(plan)
    assert bound_s({"c": (5,), "d": (5,)}, {"a": (TILE,), "c": (5,)}) == 0
