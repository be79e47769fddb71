"""Small plans, costs and heavy-tailed batches for the scheduler's tests."""

import numpy as np
import pytest

from dflop_jax.records import Bucket, Plan, SampleShape, SegmentPlan, SubmeshPlan
from dflop_jax.schedule import BucketCosts


def make_plan(buckets, vision=2, llm=2, group_size=1, grouping="balanced"):
    """A plan with one segment per module; `vision=0` leaves the encoder out."""
    submeshes = [SubmeshPlan("llm", vision, 1, llm, 1)]
    segments = [SegmentPlan("llm", "llm", 0, 4, "llm", True, True)]
    if vision:
        submeshes.insert(0, SubmeshPlan("vision", 0, 1, vision, 1))
        segments.insert(0, SegmentPlan("vision", "vision", 0, 4, "vision", True, True))
    return Plan(
        "dflop" if grouping == "balanced" else "blind",
        tuple(submeshes),
        tuple(segments),
        tuple(buckets),
        group_size=group_size,
        grouping=grouping,
    )


def make_costs(plan):
    """Seconds in proportion to capacity, with a constant per call."""
    rows = [(0.01 * b.tiles + 0.01, 0.002 * b.tokens * b.rows + 0.01) for b in plan.buckets]
    return BucketCosts(tuple(row[-len(plan.modules) :] for row in rows))


def make_batch(rng, n, most_tiles=12, most_tokens=120):
    tiles = np.minimum(rng.pareto(1.2, n) * 2, most_tiles).astype(int) * (rng.random(n) < 0.8)
    text = np.minimum(5 + rng.lognormal(2.5, 0.6, n), most_tokens).astype(int)
    return [
        SampleShape(int(t), int(k), int(min(most_tokens, 4 * t + k))) for t, k in zip(tiles, text)
    ]


@pytest.fixture
def small_plan():
    return make_plan([Bucket(16, 256), Bucket(8, 256), Bucket(8, 128), Bucket(0, 128)])
