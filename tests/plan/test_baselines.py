"""The plans of baselines that a run is compared with: against searches of the baselines."""

import dataclasses
import itertools

import pytest

from dflop_jax.plan.baselines import quick_baselines
from dflop_jax.plan.evaluate import simulate
from dflop_jax.records import ARRIVAL_ORDER, FSDP, PriceList
from dflop_jax.schedule.baselines import Baseline, Baselines, simulate_baselines

from .cases import CONFIG, data_profile, model_profile, prepared, run

BLIND = dataclasses.replace(CONFIG, policy="blind")


def test_arrival_order_is_the_best_plan_of_blind_and_fsdp_of_its_layout():
    evaluator = prepared(4, config=BLIND)
    plans = quick_baselines(evaluator).by_name
    blind = run("blind", 4, refine=False, n_shown=100)
    assert plans[ARRIVAL_ORDER].layout.submeshes == blind.plan.layout.submeshes
    assert plans[ARRIVAL_ORDER].layout.buckets == blind.plan.layout.buckets
    (mesh,) = plans[FSDP].layout.submeshes
    assert (mesh.stage, mesh.data, mesh.model) == (1, 4, 1)
    (uniform,) = (c.plan for c in blind.candidates if c.plan.layout.submeshes == (mesh,))
    assert plans[FSDP].layout.buckets == uniform.layout.buckets


def test_the_step_in_arrival_order_is_that_of_a_run_under_blind():
    """With the run's programs as the profile prices them, from the policy's own search on."""
    profile, loads = model_profile(), data_profile().loads[:8]
    plan, blind = (run(policy, 4, refine=False).plan for policy in ("dflop", "blind"))
    context = prepared(4, config=BLIND).context
    prices = context.price_layout(plan.layout, plan.policy), context.price_layout(blind.layout)
    lists = [*map(PriceList.from_prices, prices)]
    names = [tuple(s.name for s in p.layout.segments) for p in (plan, blind)]
    baselines = Baselines({ARRIVAL_ORDER: Baseline(blind, lists[1], names[1])}, lists[0])
    found = simulate_baselines(loads, plan, lists[0].prices, names[0], baselines)
    assert found[ARRIVAL_ORDER] == pytest.approx(simulate(blind, [loads], profile).makespan_s)


def test_a_baseline_that_does_not_fit_is_absent():
    """Uniform data parallelism alone has no plan in memory that tensor parallelism fits into."""
    free = quick_baselines(prepared(4, config=BLIND))
    assert free.by_name.keys() == {ARRIVAL_ORDER, FSDP}
    assert not quick_baselines(prepared(4, config=BLIND, memory_bytes=1.0)).by_name
    peaks = {}
    for name, plan in free.by_name.items():
        evaluator = prepared(4, config=BLIND, zero=1, remat="none")
        peaks[name] = evaluator.max_peak_bytes(plan)
    found = [
        quick_baselines(prepared(4, config=BLIND, zero=1, remat="none", memory_bytes=n)).by_name
        for n in range(int(0.4 * peaks[FSDP]), int(peaks[FSDP]), int(peaks[FSDP] / 20))
    ]
    assert {ARRIVAL_ORDER} in map(set, found)
    for smaller, larger in itertools.pairwise(found):
        assert smaller.keys() <= larger.keys()


def test_one_device_has_both_in_one_plan():
    plans = quick_baselines(prepared(1, config=dataclasses.replace(BLIND, max_stage=1))).by_name
    assert plans[ARRIVAL_ORDER] == plans[FSDP]
