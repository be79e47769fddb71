"""Explanations of slower placements, of too little memory, and of what would help."""

import dataclasses
import re

import pytest

from dflop_jax.hardware import HARDWARE, find_hardware
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.explain import explain_slowdown, savings
from dflop_jax.plan.search import build_evaluator, search_plan
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.records import Predicted

from ..plans import chain, params
from .cases import BATCH, CONFIG, LINKS, data_profile, model_profile, on

GIB = 2**30


def candidate(makespan_s, vision_s, llm_s):
    busy = {"vision": vision_s / makespan_s, "llm": llm_s / makespan_s}
    plan = dataclasses.replace(chain(2, vision=1), predicted=Predicted(makespan_s, busy))
    return Candidate(plan, 4, makespan_s)


@pytest.mark.parametrize("makespan_s, vision_s, llm_s, says", [
    (1.2, 1.1, 0.6, "+20.0%: vision alone computes 1100.0 ms"),
    (1.1, 0.55, 0.95, "+10.0%: llm computes 950.0 ms, vision waits 50%"),
    (1.6, 0.4, 0.8, "+60.0%: even llm, the busiest, waits 50%"),
    (1 - 1e-9, 1.1, 0.6, "+0.0%: vision alone computes 1100.0 ms"),
])  # fmt: skip
def test_explain_slowdown(makespan_s, vision_s, llm_s, says):
    best = candidate(1.0, 0.7, 0.9)
    assert explain_slowdown(candidate(makespan_s, vision_s, llm_s), best) == says
    assert explain_slowdown(best, best) == ""


def plan(n_devices, memory_bytes, hardware=None):
    big = dataclasses.replace(model_profile(), layer_dims=params({"vision": GIB, "llm": 4 * GIB}))
    config = dataclasses.replace(CONFIG, policy="auto", effort="quick")
    spec = SearchSpec(n_devices, BATCH, config, memory_bytes, refine=False)
    return search_plan(on(hardware, big), data_profile(), spec)


@pytest.mark.parametrize("gib", [10, 13, 20])
def test_proposed_number_of_devices_is_the_smallest_that_fits(gib):
    with pytest.raises(ValueError, match="no plan fits") as failed:
        plan(2, gib * GIB)
    more = int(re.search(r"would fit on (\d+) devices", str(failed.value))[1])
    assert plan(more, gib * GIB).plan.layout.n_devices == more
    with pytest.raises(ValueError, match="no plan fits"):
        plan(more // 2, gib * GIB)
    assert "or on" not in str(failed.value)  # measured profiles propose no other hardware


def test_proposed_hardware_fits():
    l40s = find_hardware("l40s")
    with pytest.raises(ValueError, match="no plan fits") as failed:
        plan(2, 4 * GIB, l40s)
    assert re.search(r"(or on \w|would fit on [A-Za-z])", str(failed.value))
    for h in HARDWARE.values():
        if re.search(rf"\b{h.name}\b", str(failed.value)):
            plan(2, h.plannable_bytes, h)


def test_no_number_of_devices_is_proposed_where_none_fits():
    remedy = r"more; a larger plan\.max_model \(2\), .*stage \(2\) or .*microbatches \(8\)"
    with pytest.raises(ValueError, match=remedy):
        plan(2, 1000.0)


def test_savings_compare_with_the_next_cheaper_option():
    """Against the next cheaper option of each module, which would not fit or costs as much."""
    profile, data = on(LINKS, model_profile()), data_profile()
    free = SearchSpec(3, BATCH, dataclasses.replace(CONFIG, policy="orch", effort="quick"))
    best = search_plan(profile, data, free)
    assert savings(build_evaluator(profile, data, free), best.plan) == []
    spec = dataclasses.replace(free, memory_bytes=0.6 * best.candidates[0].peak_bytes)
    plan = search_plan(profile, data, spec).plan
    bought = {s.module: s for s in savings(build_evaluator(profile, data, spec), plan)}
    assert set(bought) == {"vision", "llm"}
    for s in bought.values():
        assert s.chosen != s.cheaper
        assert s.saved_bytes > 0
        assert not s.fits
    assert sum(s.extra_step_s for s in bought.values()) > 0
