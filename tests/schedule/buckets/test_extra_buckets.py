"""The spare bucket: what holds the samples that no other does, no larger than they need."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule import Capacity, schedule_batch
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples, spare_bucket
from tests.schedule.conftest import TILE, bucket, check, make_plan, make_prices

RANKS = {"a": 2, "b": 2}


def test_spare_bucket_is_minimal():
    rng = np.random.default_rng(0)
    for _ in range(20):
        loads = [
            Load({"a": tuple(rng.integers(1, 90, rng.integers(1, 9)).tolist()),
                  "b": (int(rng.integers(1, 300)),)})
            for _ in range(5)
        ]  # fmt: skip
        spare = spare_bucket(loads, Capacity(RANKS), {}, 32)
        plan = make_plan((spare,), RANKS)
        assert oversize_samples(loads, plan) == []
        for m, shape in spare.shapes:
            assert shape.tokens % 32 == 0
            assert shape.tokens - 32 < max(max(load.lengths(m)) for load in loads)
            if shape.rows > 1:
                less = {**dict(spare.shapes), m: Shape(shape.rows - 1, shape.tokens)}
                assert oversize_samples(loads, make_plan((Bucket.from_shapes(less),), RANKS))


def test_spare_bucket_of_tiles_and_missing_modules():
    loads = [Load({"a": (TILE,) * 5}), Load({"a": (TILE,) * 2})]
    spare = spare_bucket(loads, Capacity(RANKS), {"a": TILE}, 32)
    assert spare == Bucket.from_shapes({"a": Shape(3, TILE)})


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
    schedule = schedule_batch(loads, plan, make_prices(plan), plan.layout.modules)
    check(schedule, loads, plan)
    shapes = [g.shape for g in schedule.groups if g.module == "b"]
    assert shapes.count(spare.shape("b")) == 1
    assert small.shape("b") in shapes
