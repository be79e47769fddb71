"""A second recompute policy: taken where it makes steps faster, within memory at every moment."""

import dataclasses

import pytest

import dflop_jax.plan.search as search_module
from dflop_jax.plan.second_policy import with_second_policies
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.records import REMAT
from dflop_jax.schedule import schedule_batch
from dflop_jax.sim.memory import byte_table

from .cases import BATCH, CONFIG, data_profile, run
from .test_search import keeps_little

SHARES = (0.35, 0.45, 0.55, 0.75)


@pytest.fixture(scope="module")
def free():
    return run("dip", 4, profile=keeps_little()).plan


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("share", SHARES)
def test_groups_keep_more_where_there_is_room(free, share):
    profile, limit = keeps_little(), share * max(free.predicted.peak_bytes.values())
    plan = run("dip", 4, profile=profile, memory_bytes=limit).plan
    spec = SearchSpec(4, BATCH, dataclasses.replace(CONFIG, policy="dip"), limit)
    evaluator = search_module.evaluator_of(profile, data_profile(), spec)
    assert max(plan.predicted.peak_bytes.values()) <= limit
    one = tuple(dataclasses.replace(s, remat_less=None) for s in plan.layout.segments)
    plain = plan.with_layout(segments=one).with_scheduling(kept=(), free_bytes={})
    assert bool(plan.scheduling.kept) == (one != plan.layout.segments)
    if plan.scheduling.kept:
        with_s, without_s = (sum(evaluator.trial_s(p, i) for i in range(2)) for p in (plan, plain))
        assert with_s < without_s
    table, prices = byte_table(plan.layout, profile), evaluator.prices(plan.layout)
    trainable = [s.name for s in plan.layout.segments]
    for batch in (*evaluator.unseen, *evaluator.trial(0), *evaluator.trial(1)):
        schedule = schedule_batch(batch, plan, prices, trainable)
        assert max(held(plan, schedule, table)) <= limit


def held(plan, schedule, table):
    """Bytes of the device of each task of an order when it has run, from the forwards that no
    backward has followed."""
    where = {s.name: s.submesh for s in plan.layout.segments}
    both = {(t.segment, t.group) for t in schedule.order if t.direction == "forward"}
    now = dict(table.constant)
    for t in schedule.order:
        if (t.segment, t.group) in both and t.direction in ("forward", "backward"):
            group = schedule.groups[t.group]
            kept = table.keeping if t.segment in group.remat_less else table.kept
            sign = 1 if t.direction == "forward" else -1
            now[where[t.segment]] += sign * kept[t.segment, group.shape]
        yield now[where[t.segment]]


def test_some_plan_has_one(free):
    most = max(free.predicted.peak_bytes.values())
    plans = [
        run("dip", 4, profile=keeps_little(), memory_bytes=share * most).plan for share in SHARES
    ]
    second = [s for p in plans for s in p.layout.segments if s.remat_less]
    assert second
    assert all(REMAT.index(s.remat_less) < REMAT.index(s.remat) for s in second)


def test_without_a_limit_or_anything_recomputed_there_is_none(free):
    for limit in (0.0, 1e12):
        spec = SearchSpec(4, BATCH, dataclasses.replace(CONFIG, policy="dip"), limit)
        evaluator = search_module.evaluator_of(keeps_little(), data_profile(), spec)
        assert with_second_policies(free, evaluator) == []
