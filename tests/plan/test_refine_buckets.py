"""Variants of candidates: smaller buckets, shorter rows, spare buckets, second recompute."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflop_jax.config import PlanConfig
from dflop_jax.plan.evaluate import buckets_with_shares
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.records import REMAT, Bucket, Load, Shape
from dflop_jax.schedule.buckets.sizes import oversize_samples

from ..plans import chain
from .cases import CONFIG, TILE, data_profile, prepared, run
from .test_search import profile_with_few_residuals

TEN = (10, 16), (10, 128)
FOUR = {0.8: ((8, 16), (8, 128)), 0.6: ((6, 16), (6, 128)), 0.3: ((3, 16), (3, 128))}


@pytest.mark.parametrize("shapes, n_buckets, longest, expected", [
    (((10, 16), (5, 128)), 2, 20, {0.6: ((6, 16), (3, 128))}),
    (((10, 16), (4, 128)), 2, 20, {0.75: ((6, 16), (3, 128))}),  # whole rows
    # One packed row is cut, to a multiple of 32 and the longest piece; a piece is not.
    (((1, 16), (1, 320)), 2, 20, {0.6: ((1, 16), (1, 192))}),
    (((1, 16), (1, 320)), 2, 230, {0.8: ((1, 16), (1, 256))}),
    (((2, 16), (1, 32)), 2, 20, {}),  # nothing to cut
    # As many as plans may have, if they differ.
    (TEN, 1, 20, {}), (TEN, 3, 20, {k: FOUR[k] for k in (0.6, 0.3)}), (TEN, 9, 20, FOUR),
    (((2, 16), (2, 128)), 4, 20, {0.5: ((1, 16), (1, 128))}),
])  # fmt: skip
def test_smaller_buckets_hold_a_share_of_the_largest(shapes, n_buckets, longest, expected):
    spec = SearchSpec(1, 8, PlanConfig(buckets=n_buckets), token_multiple=32)
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": 16}))
    context = SearchContext(costs, {"llm": SimpleNamespace(max_piece_tokens=longest)}, spec)
    largest = Bucket.from_shapes({m: Shape(*s) for m, s in zip(("vision", "llm"), shapes)})
    layout = replace(chain(2, vision=1).layout, buckets=(largest,))
    (first, whole), *rest = buckets_with_shares(layout, context).items()
    assert (first, whole) == (largest, 1.0)
    got = {share: tuple((s.rows, s.tokens) for _, s in b.shapes) for b, share in rest}
    assert got == expected


LARGE = Load({"vision": (TILE,) * 60, "llm": (900,)})


def test_tail_samples_get_a_spare_bucket():
    plain = run().plan
    data = replace(data_profile(), tail=(data_profile().loads[0], LARGE))
    plan = run(data=data).plan
    assert oversize_samples(data.tail, plain) == [1]
    assert oversize_samples(data.tail, plan) == []
    assert set(plain.layout.buckets) < set(plan.layout.buckets)
    assert len(plan.layout.buckets) == len(plain.layout.buckets) + 1
    assert run(data=replace(data, tail=data.tail[:1])).plan == plain


def test_spare_bucket_is_left_out_where_memory_is_short():
    data = replace(data_profile(), tail=(LARGE,))
    memory_bytes = max(run().plan.predicted.peak_bytes.values()) * 1.05
    plan = run(data=data, memory_bytes=memory_bytes).plan
    assert oversize_samples(data.tail, plan) == [0]
    assert max(plan.predicted.peak_bytes.values()) <= memory_bytes


@pytest.fixture(scope="module")
def unlimited_plan():
    return run("dip", 4, profile=profile_with_few_residuals()).plan


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("share", [0.35, 0.45, 0.55, 0.75])
def test_second_remat_uses_free_memory(unlimited_plan, share):
    profile = profile_with_few_residuals()
    limit = share * max(unlimited_plan.predicted.peak_bytes.values())
    plan = run("dip", 4, profile=profile, memory_bytes=limit).plan
    config = replace(CONFIG, policy="dip")
    evaluator = prepared(4, profile, config=config, memory_bytes=limit)
    assert max(plan.predicted.peak_bytes.values()) <= limit
    one = tuple(replace(s, remat_less=None) for s in plan.layout.segments)
    plain = plan.with_layout(segments=one).with_scheduling(residuals=(), free_bytes={})
    assert bool(plan.scheduling.residuals) == (one != plan.layout.segments)
    second = [s for s in plan.layout.segments if s.remat_less]
    assert all(REMAT.index(s.remat_less) < REMAT.index(s.remat) for s in second)
    if second:
        with_s, without_s = (
            sum(evaluator.simulate_round(p, i) for i in range(2)) for p in (plan, plain)
        )
        assert with_s < without_s
