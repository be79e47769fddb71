"""Small plans without a model, for the tests of order, simulation, costs and search."""

from __future__ import annotations

import numpy as np

from dflop_jax.records import Bucket, Plan, SegmentPlan, SubmeshPlan


def chain(
    n: int, *, vision: int = 0, order: str = "1f1b", tiles: int = 4, first: tuple[int, ...] = ()
) -> Plan:
    """`n` segments in a row, the first `vision` of the encoder, each on a device of its own.

    `first` places them by hand; equal devices make segments share them. Bucket 1 has no tiles.
    """
    first = first or tuple(range(n))
    names = [f"v{i}" if i < vision else f"l{i - vision}" for i in range(n)]
    segments = []
    for i, name in enumerate(names):
        start, stop = (0, vision) if i < vision else (vision, n)
        module = "vision" if i < vision else "llm"
        at = i - start
        segments.append(SegmentPlan(name, module, at, at + 1, name, i == start, i == stop - 1))
    submeshes = tuple(SubmeshPlan(m, f, 1, 1, 1) for m, f in zip(names, first, strict=True))
    buckets = (Bucket(tiles if vision else 0, 64), Bucket(0, 64))
    return Plan("test", submeshes, tuple(segments), buckets, order=order)


def random_plan(rng: np.random.Generator) -> Plan:
    """A chain with meshes of several devices, some shared, some overlapping in part."""
    n, order = int(rng.integers(1, 6)), str(rng.choice(["1f1b", "gpipe"]))
    plan = chain(n, vision=int(rng.integers(0, n)), order=order)
    submeshes = tuple(
        SubmeshPlan(m.name, int(rng.integers(0, 6)), 1, 1, int(rng.integers(1, 4)))
        for m in plan.submeshes
    )
    return Plan("test", submeshes, plan.segments, plan.buckets, order=order)
