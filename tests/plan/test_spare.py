"""A bucket for the tail of the dataset, where memory has room for it."""

from dataclasses import replace

from dflop_jax.plan.pricing import plan_prices
from dflop_jax.records import Load
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.shapes.spare import beyond

from .cases import TILE, data_profile, run
from .test_dip import deep_profile

LARGE = Load({"vision": (TILE,) * 60, "llm": (900,)})


def test_the_tail_gets_a_bucket_beside_those_that_were_chosen():
    plain = run().plan
    data = replace(data_profile(), tail=(data_profile().loads[0], LARGE))
    plan = run(data=data).plan
    assert beyond(data.tail, plain) == [1]
    assert beyond(data.tail, plan) == []
    assert set(plain.layout.buckets) < set(plan.layout.buckets)
    assert len(plan.layout.buckets) == len(plain.layout.buckets) + 1
    assert replace(data, tail=data.tail[:1]).tail
    assert run(data=replace(data, tail=data.tail[:1])).plan == plain


def test_memory_that_is_short_leaves_the_spare_bucket_out():
    data = replace(data_profile(), tail=(LARGE,))
    memory_bytes = max(run().plan.predicted.peak_bytes.values()) * 1.05
    plan = run(data=data, memory_bytes=memory_bytes).plan
    assert beyond(data.tail, plan) == [0]
    assert max(plan.predicted.peak_bytes.values()) <= memory_bytes


def test_divided_groups_have_one_shape_and_the_tail_gets_as_many_as_may_feed_one():
    profile = replace(deep_profile(llm=0.3), task_overhead_s=1e-5)
    loads = tuple(Load({"vision": (TILE,) * n, "llm": (4 * n + 20,)}) for n in (2, 9, 30, 60) * 5)
    data = replace(data_profile(), loads=loads, n_total=20)
    long = Load({"vision": (TILE,) * 2, "llm": (900,)})
    plain, plan = (
        run("dip", 4, profile, replace(data, tail=tail)).plan for tail in ((), (long, LARGE))
    )
    assert plan.layout.fan_in == plain.layout.fan_in > 1
    assert plan.layout.shapes("vision") == plain.layout.shapes("vision")
    assert beyond((long,), plain) == [0]
    assert beyond((long,), plan) == []
    assert schedule_batch((long,), plan, plan_prices(plan.layout, profile), ())
