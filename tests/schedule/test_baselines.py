"""Baselines that a run is compared with: steps against simulations of schedules made without the
comparison, and prices against sums by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import (
    LONGEST_FIRST,
    NO_GROUP,
    UPDATE,
    Load,
    PriceList,
    Task,
    from_json,
    to_json,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.baselines import Baseline, Baselines, price_ratios, simulate_baselines
from dflop_jax.schedule.worker import BatchRequest, SolverSetup, answer_request
from dflop_jax.simulate.steps import simulate_step
from tests.schedule.conftest import TILE, bucket, make_batch, make_plan, make_prices

BUCKETS = [bucket(16, (2, 256)), bucket(8, (2, 128)), bucket(0, (2, 128))]
RUN = make_plan(BUCKETS)
# Every device runs both modules on its own samples, one per row.
ARRIVAL = make_plan(
    [bucket(32, (2, 128)), bucket(0, (2, 64))], grouping="arrival", shared=("a", "b")
)
MODULES = RUN.layout.modules
PAIR_S = 1e-7


def priced(plan, end_s=0.02):
    ends = {Task(m, NO_GROUP, UPDATE): end_s for m in MODULES}
    return replace(make_prices(plan, PAIR_S), step_end=ends)


def baselines(**plans):
    by_name = {
        name: Baseline(plan, PriceList.from_prices(priced(plan)), MODULES)
        for name, plan in plans.items()
    }
    return Baselines(by_name, PriceList.from_prices(priced(RUN)))


def step_s(loads, plan, prices):
    """The step of a schedule that the plan's own run makes."""
    schedule = schedule_batch(loads, plan, prices, MODULES, work=0)
    return simulate_step(plan, schedule, prices, MODULES).makespan_s


def loads_of(seed, n=40):
    return make_batch(np.random.default_rng(seed), n)


@pytest.mark.parametrize("loads", [
    loads_of(1), loads_of(2, 1), [Load({"b": (9,)}), Load({"b": (70,)})],
    [Load({"a": (TILE,) * 3, "b": (20,)})],
])  # fmt: skip
def test_steps_equal_those_of_schedules_made_alone(loads):
    """Also of one sample, and of a batch without a piece of module "a"."""
    found = simulate_baselines(loads, RUN, priced(RUN), MODULES, baselines(blind=ARRIVAL))
    assert found[LONGEST_FIRST] == pytest.approx(step_s(loads, RUN, priced(RUN)))
    assert found["blind"] == pytest.approx(step_s(loads, ARRIVAL, priced(ARRIVAL)))


def test_untimed_programs_are_as_far_off_the_profile_as_the_runs_own():
    loads = loads_of(3)
    scale = {"a": 3.0, "b": 0.5}
    timed = replace(
        priced(RUN, end_s=0.2),
        programs={p: price.scaled(scale[p.segment]) for p, price in priced(RUN).programs.items()},
    )
    by_profile = priced(ARRIVAL)
    expected = {p: price.scaled(scale[p.segment]) for p, price in by_profile.programs.items()}
    ends = {task: 10 * s for task, s in by_profile.step_end.items()}
    expected = replace(by_profile, programs=expected, step_end=ends)
    found = simulate_baselines(loads, RUN, timed, MODULES, baselines(blind=ARRIVAL))
    assert found["blind"] == pytest.approx(step_s(loads, ARRIVAL, expected))
    assert found[LONGEST_FIRST] == pytest.approx(step_s(loads, RUN, timed))


def test_a_ratio_weighs_programs_by_what_they_run():
    """Module "a" has no group; its ratio is that of all."""
    loads = [Load({"b": (120,)})] * 3 + [Load({"b": (9,)})]
    schedule = schedule_batch(loads, RUN, priced(RUN), MODULES, work=0)
    timed = make_prices(RUN, PAIR_S, factor=lambda p: 1.0 + p.shape.tokens / 128)
    took = [0.0, 0.0]
    for g in schedule.groups:
        for k, prices in enumerate((timed, priced(RUN))):
            (price,) = (
                p for i, p in prices.programs.items() if i.segment == "b" and i.shape == g.shape
            )
            took[k] += price.static_s + price.content_s[0] * g.content[0]
    ratios = price_ratios(RUN.layout, schedule.groups, timed, priced(RUN), MODULES)
    assert ratios == {"a": pytest.approx(took[0] / took[1]), "b": pytest.approx(took[0] / took[1])}
    assert ratios["b"] > 1.5
    assert price_ratios(RUN.layout, (), timed, priced(RUN), MODULES) == {"a": 1.0, "b": 1.0}


def test_a_baseline_whose_buckets_do_not_hold_a_sample_is_absent():
    small = replace(ARRIVAL, layout=replace(ARRIVAL.layout, buckets=(bucket(32, (2, 32)),)))
    compared = baselines(blind=ARRIVAL, small=small)
    found = simulate_baselines(loads_of(4), RUN, priced(RUN), MODULES, compared)
    assert found.keys() == {LONGEST_FIRST, "blind"}


def test_the_worker_replies_with_steps_and_what_they_cost():
    setup = SolverSetup(RUN, MODULES, baselines=baselines(blind=ARRIVAL))
    setup = from_json(to_json(setup), SolverSetup)
    prices, loads = PriceList.from_prices(priced(RUN)), tuple(loads_of(5))
    reply = answer_request(setup, BatchRequest(9, loads, prices, for_baselines=True))
    assert reply.baseline_s == simulate_baselines(
        loads, RUN, priced(RUN), MODULES, baselines(blind=ARRIVAL)
    )
    assert reply.cpu_s > 0
    assert reply.schedule is None
