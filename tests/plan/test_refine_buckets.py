"""Variants of candidates: smaller buckets, shorter rows, spare buckets, second recompute."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflop_jax.config import PlanConfig
from dflop_jax.plan import refine_buckets
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.memory import byte_table
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.one_bucket import buckets_with_shares
from dflop_jax.plan.refine_buckets import with_second_remat
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.plan.volume import module_volume
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import REMAT, Bucket, Load, Shape
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples

from ..plans import TILE_TOKENS, bucket, chain, load
from .cases import CONFIG, TILE, data_profile, prepared, run
from .test_dip import deep_profile
from .test_search import profile_with_few_residuals


def shorter_buckets(plan, loads, batch_tokens=(0,)):
    """The plans with shorter rows that are made of a plan for these samples, in batches of so many
    tokens."""
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": TILE_TOKENS}))
    volumes = {"llm": module_volume("llm", loads, [loads], len(loads), counts_pieces=False)}
    rules = SearchContext(costs, volumes, SearchSpec(1, len(loads)))

    def n_groups(layout, batch):
        (one,) = layout.buckets
        return max(1, -(-batch_tokens[batch] // one.shape("llm").size))

    evaluator = SimpleNamespace(
        context=rules,
        loads=loads,
        batches=batch_tokens,
        count_groups=n_groups,
        fits=lambda plan: True,
    )
    found = refine_buckets._with_shorter_rows(evaluator, Candidate(plan, trial_seconds=(1.0,)))
    assert not any(f.trial_seconds for f in found)
    return [f.plan.layout.buckets for f in found]


def with_buckets(*buckets):
    return chain(2, vision=1).with_layout(buckets=buckets)


def test_packed_rows_are_as_short_as_the_longest_piece():
    plan = with_buckets(bucket(8, 384, 4), bucket(4, 384, 2), bucket(0, 256))
    found = shorter_buckets(plan, [load(2, 337), load(0, 40)])
    assert found == [(bucket(8, 352, 4), bucket(4, 352, 2), bucket(0, 256))]
    assert shorter_buckets(plan, [load(1, 353)]) == []  # as short as can be
    unlike = with_buckets(bucket(8, 384, 4), bucket(8, 368, 4))
    assert shorter_buckets(unlike, [load(2, 337)]) == [(bucket(8, 352, 4),)]
    assert shorter_buckets(with_buckets(bucket(4, 32)), [load(0, 1)]) == []


@pytest.mark.parametrize(
    "batch_tokens, tried", [((1400, 1400), True), ((1400, 1410), False), ((14_000, 15_000), True)]
)
def test_rows_stay_long_where_shorter_ones_need_more_groups(batch_tokens, tried):
    """Four rows of 384 tokens hold 1,536, of 352 they hold 1,408."""
    found = shorter_buckets(with_buckets(bucket(8, 384, 4)), [load(2, 337)], batch_tokens)
    assert found == [(bucket(8, 352, 4),)] * tried


def test_rows_stay_long_where_a_sample_needs_them():
    """Five pictures of 40 tokens take two rows of 128, three of which 64 are one too few."""
    plan = with_buckets(bucket(8, 128, 2))
    loads = [Load({"vision": (TILE_TOKENS,), "llm": (40,) * 5})]
    assert shorter_buckets(plan, loads) == []
    assert shorter_buckets(plan, [Load({"llm": (40,) * 2})]) == [(bucket(8, 64, 2),)]


def search_context(buckets, longest=20):
    spec = SearchSpec(1, 8, PlanConfig(buckets=buckets), token_multiple=32)
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": 16}))
    return SearchContext(costs, {"llm": SimpleNamespace(max_piece_tokens=longest)}, spec)


def smaller_shapes(vision, llm, buckets, **options):
    """Share -> shapes of the smaller buckets."""
    bucket = Bucket.from_shapes({"vision": Shape(*vision), "llm": Shape(*llm)})
    layout = replace(chain(2, vision=1).layout, buckets=(bucket,))
    given = search_context(buckets, **options)
    (first, whole), *rest = buckets_with_shares(layout, given).items()
    assert (first, whole) == (bucket, 1.0)
    return {share: tuple((s.rows, s.tokens) for _, s in b.shapes) for b, share in rest}


TEN = (10, 16), (10, 128)
FOUR = {0.8: ((8, 16), (8, 128)), 0.6: ((6, 16), (6, 128)), 0.3: ((3, 16), (3, 128))}


@pytest.mark.parametrize(
    "shapes, buckets, longest, expected",
    [
        (((10, 16), (5, 128)), 2, 20, {0.6: ((6, 16), (3, 128))}),
        (((10, 16), (4, 128)), 2, 20, {0.75: ((6, 16), (3, 128))}),  # whole rows
        # One packed row is cut, to a multiple of 32 and the longest piece; a piece is not.
        (((1, 16), (1, 320)), 2, 20, {0.6: ((1, 16), (1, 192))}),
        (((1, 16), (1, 128)), 2, 20, {0.75: ((1, 16), (1, 96))}),
        (((1, 16), (1, 320)), 2, 230, {0.8: ((1, 16), (1, 256))}),
        (((1, 16), (1, 320)), 2, 300, {}),
        (((2, 16), (1, 32)), 2, 20, {}),  # nothing to cut
        # As many as plans may have, if they differ.
        (TEN, 1, 20, {}),
        (TEN, 3, 20, {k: FOUR[k] for k in (0.6, 0.3)}),
        (TEN, 4, 20, FOUR),
        (TEN, 9, 20, FOUR),
        (((2, 16), (2, 128)), 4, 20, {0.5: ((1, 16), (1, 128))}),
    ],
)
def test_smaller_buckets_hold_a_share_of_the_largest(shapes, buckets, longest, expected):
    assert smaller_shapes(*shapes, buckets, longest=longest) == expected


LARGE = Load({"vision": (TILE,) * 60, "llm": (900,)})


def test_tail_samples_get_a_spare_bucket():
    plain = run().plan
    data = replace(data_profile(), tail=(data_profile().loads[0], LARGE))
    plan = run(data=data).plan
    assert oversize_samples(data.tail, plain) == [1]
    assert oversize_samples(data.tail, plan) == []
    assert set(plain.layout.buckets) < set(plan.layout.buckets)
    assert len(plan.layout.buckets) == len(plain.layout.buckets) + 1
    assert replace(data, tail=data.tail[:1]).tail
    assert run(data=replace(data, tail=data.tail[:1])).plan == plain


def test_spare_bucket_is_left_out_where_memory_is_short():
    data = replace(data_profile(), tail=(LARGE,))
    memory_bytes = max(run().plan.predicted.peak_bytes.values()) * 1.05
    plan = run(data=data, memory_bytes=memory_bytes).plan
    assert oversize_samples(data.tail, plan) == [0]
    assert max(plan.predicted.peak_bytes.values()) <= memory_bytes


def test_spare_bucket_keeps_the_shape_of_sub_microbatches():
    profile = replace(deep_profile(llm=0.3), task_overhead_s=1e-5)
    loads = tuple(Load({"vision": (TILE,) * n, "llm": (4 * n + 20,)}) for n in (2, 9, 30, 60) * 5)
    data = replace(data_profile(), loads=loads, n_total=20)
    long = Load({"vision": (TILE,) * 2, "llm": (900,)})
    plain, plan = (
        run("dip", 4, profile, replace(data, tail=tail)).plan for tail in ((), (long, LARGE))
    )
    assert plan.layout.fan_in == plain.layout.fan_in > 1
    assert plan.layout.shapes("vision") == plain.layout.shapes("vision")
    assert oversize_samples((long,), plain) == [0]
    assert oversize_samples((long,), plan) == []
    assert schedule_batch((long,), plan, layout_prices(plan.layout, CostModel(profile)), ())


SHARES = (0.35, 0.45, 0.55, 0.75)


@pytest.fixture(scope="module")
def unlimited_plan():
    return run("dip", 4, profile=profile_with_few_residuals()).plan


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("share", SHARES)
def test_second_remat_uses_free_memory(unlimited_plan, share):
    profile, limit = (
        profile_with_few_residuals(),
        share * max(unlimited_plan.predicted.peak_bytes.values()),
    )
    plan = run("dip", 4, profile=profile, memory_bytes=limit).plan
    config = replace(CONFIG, policy="dip")
    evaluator = prepared(4, profile, config=config, memory_bytes=limit)
    assert max(plan.predicted.peak_bytes.values()) <= limit
    one = tuple(replace(s, remat_less=None) for s in plan.layout.segments)
    plain = plan.with_layout(segments=one).with_scheduling(residuals=(), free_bytes={})
    assert bool(plan.scheduling.residuals) == (one != plan.layout.segments)
    if plan.scheduling.residuals:
        with_s, without_s = (
            sum(evaluator.simulate_trial(p, i) for i in range(2)) for p in (plan, plain)
        )
        assert with_s < without_s
    table, prices = byte_table(plan.layout, profile), evaluator.prices(plan.layout)
    trainable = [s.name for s in plan.layout.segments]
    for batch in (
        *evaluator.evaluation_batches,
        *evaluator.trial_batches(0),
        *evaluator.trial_batches(1),
    ):
        schedule = schedule_batch(batch, plan, prices, trainable)
        assert max(live_bytes(plan, schedule, table)) <= limit


def live_bytes(plan, schedule, table):
    """Bytes of the device of each task of an order when it has run, from the forwards that no
    backward has followed."""
    where = {s.name: s.submesh for s in plan.layout.segments}
    both = {(t.segment, t.group) for t in schedule.order if t.direction == "forward"}
    now = dict(table.constant_bytes)
    for t in schedule.order:
        if (t.segment, t.group) in both and t.direction in ("forward", "backward"):
            group = schedule.groups[t.group]
            kept = table.second_group_bytes if t.segment in group.remat_less else table.group_bytes
            sign = 1 if t.direction == "forward" else -1
            now[where[t.segment]] += sign * kept[t.segment, group.shape]
        yield now[where[t.segment]]


def test_some_limit_gives_a_second_remat(unlimited_plan):
    most = max(unlimited_plan.predicted.peak_bytes.values())
    plans = [
        run("dip", 4, profile=profile_with_few_residuals(), memory_bytes=share * most).plan
        for share in SHARES
    ]
    second = [s for p in plans for s in p.layout.segments if s.remat_less]
    assert second
    assert all(REMAT.index(s.remat_less) < REMAT.index(s.remat) for s in second)


def test_no_second_remat_without_limit_or_recompute(unlimited_plan):
    for limit in (0.0, 1e12):
        config = replace(CONFIG, policy="dip")
        evaluator = prepared(4, profile_with_few_residuals(), config=config, memory_bytes=limit)
        assert with_second_remat(unlimited_plan, evaluator) == []
