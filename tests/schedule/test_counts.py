"""The integer program of a batch's counts, against the same program in cvxpy."""

import numpy as np
import pytest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule import count_program, count_solver
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, bucket_variants, capacity_of
from dflop_jax.schedule.costs import bucket_ticks, group_costs
from dflop_jax.schedule.count_program import program_sizes
from dflop_jax.schedule.count_solver import batch_parameters
from dflop_jax.schedule.groups import PackingSpace, greedy_assignment
from tests.schedule.conftest import (
    TILE,
    bucket,
    make_batch,
    make_plan,
    make_prices,
    program_of,
    solve,
)

PLAN = make_plan(
    [bucket(8, (1, 256)), bucket(2, (1, 256)), bucket(4, (1, 128)), bucket(0, (1, 96))]
)


def room_of(loads, plan, prices):
    batch = Batch(loads, capacity_of(plan.layout))
    buckets = bucket_variants(plan.layout, batch)
    costs = group_costs(plan.layout, prices, plan.layout.modules)
    return PackingSpace(batch, buckets, bucket_ticks(costs, buckets))


def numbers_for(loads):
    layout, prices = PLAN.layout, make_prices(PLAN)
    room = room_of(loads, PLAN, prices)
    known = [t.bucket for t in greedy_assignment(room, 4)]
    known_C = np.bincount(known, minlength=len(room.buckets))
    sizes = program_sizes(layout)
    return batch_parameters(room, layout, prices, layout.modules, sizes, known_C), known_C


def test_two_end_groups_are_required_only_where_ends_differ():
    """Groups of the LLM wait for tiles or not; without another module no group waits."""
    numbers, _ = numbers_for([Load({"a": (TILE,) * 8, "b": (200,)}), Load({"b": (250,)})] * 3)
    assert numbers.values["same_end"].tolist() == [1.0, 0.0]
    plan = make_plan([bucket(0, (1, 256)), bucket(0, (1, 128))], {"b": 2})
    room = room_of([Load({"b": (200,)})] * 6, plan, make_prices(plan))
    sizes = program_sizes(plan.layout)
    alone = batch_parameters(room, plan.layout, make_prices(plan), ["b"], sizes, np.array([3, 0]))
    assert alone.values["same_end"].tolist() == [1.0]


def by_cvxpy(values, sizes):
    """The least objective of the program with these values, without our canonical form."""
    problem, _, _ = count_program._cvxpy_problem(sizes)
    for parameter in problem.parameters():
        parameter.value = values[parameter.name()]
    return problem.solve(solver="SCIPY")


@pytest.mark.parametrize("seed", range(6))
def test_canonical_program_equals_cvxpys(seed):
    rng = np.random.default_rng(seed)
    numbers, known_C = numbers_for(make_batch(rng, [1, 2, 5, 12, 40, 80][seed]))
    sizes, program = program_sizes(PLAN.layout), program_of(PLAN)
    start_C = np.pad(known_C, (0, sizes.buckets - len(known_C)))
    solved, least_s = count_solver._solve(program, numbers, Budget(1e6))
    least = by_cvxpy(numbers.values, sizes)
    assert least_s == pytest.approx(least * numbers.unit_s, rel=2e-3)
    assert least_s <= least * numbers.unit_s
    v, (y, dealt_KC) = numbers.values, solved
    assert (v["volume"] @ y >= v["need"] - 1e-6).all()
    assert (y <= v["max_groups"]).all()
    assert dealt_KC.sum(axis=1) == pytest.approx(v["count"], abs=1e-5)
    assert numbers.lower_bound_s(y) == pytest.approx(least * numbers.unit_s, rel=3e-3)
    assert numbers.lower_bound_s(start_C) >= least_s


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
            solve(loads, plan, prices, work=800, program=program)
            for program in (None, program_of(plan))
        )
        assert plain.integer_bound_s == 0 < got.integer_bound_s <= got.makespan_s
        assert got.lower_bound_s >= plain.lower_bound_s
        assert got.made_by == made_by
        # Less work is left for the rest.
        assert got.makespan_s <= (0.9 if made_by == "integer" else 1.002) * plain.makespan_s


def test_bound_needs_every_variant_of_a_bucket():
    """Samples without a piece of a module run without its group, which may be cheaper than every
    bucket of the program."""
    ranks = {"a": 1, "b": 1, "c": 1}
    whole = Bucket.from_shapes({m: Shape(4, TILE) for m in ranks})
    plan = make_plan([whole], ranks)
    text, picture, sound = ({"c": (5,)}, {"a": (TILE,), "c": (5,)}, {"b": (TILE,), "c": (5,)})

    def bound_s(*kinds):
        got = solve([Load(kind) for kind in kinds], plan, work=500, program=program_of(plan))
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
    assert bound_s({"c": (5,), "d": (5,)}, {"a": (TILE,), "c": (5,)}) == 0
