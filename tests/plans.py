"""Small plans, for the tests of order, simulation, costs and search."""

from __future__ import annotations

import numpy as np

from dflop_jax.records import (
    Bucket,
    DataProfile,
    LayerTiming,
    ModelProfile,
    ModuleShape,
    Plan,
    Profile,
    SampleShape,
    SegmentPlan,
    SubmeshPlan,
)


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


# The model "nano" on two devices, and a profile that was never measured.
NANO = Plan(
    "dflop",
    (SubmeshPlan("vision", 0, 1, 1, 1), SubmeshPlan("llm", 1, 1, 1, 1)),
    (
        SegmentPlan("vision", "vision", 0, 2, "vision", True, True),
        SegmentPlan("llm", "llm", 0, 4, "llm", True, True),
    ),
    (Bucket(16, 256), Bucket(8, 128)),
)


def nano_profile():
    """Made up, with times in proportion to size: good enough to plan with."""
    timings = tuple(
        LayerTiming(m, 1, ModuleShape(i, t), *(1e-6 * i * t * k for k in (1, 3, 1, 3)))
        for m, i, t in (("vision", 1, 16), ("vision", 8, 16), ("llm", 1, 64), ("llm", 1, 256))
    )
    one = {"vision": 1000, "llm": 1000}
    model = ModelProfile(
        "k",
        "cpu",
        timings,
        one,
        one,
        {"vision": 2, "llm": 4},
        {"vision": 0.5, "llm": 0.5},
        {"vision": 16},
        1.0,
    )
    shapes = tuple(SampleShape(t, 60, 60 + 4 * t) for t in (0, 1, 2, 3, 4))
    return Profile(model, DataProfile("made up", 5, shapes))
