"""What the planner says of losers, of memory that is too small, and of what would help."""

import dataclasses
import re

import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.hardware import HARDWARE, USABLE_MEMORY, find_hardware
from dflop_jax.plan.explain import why_it_lost
from dflop_jax.plan.ranking import Candidate
from dflop_jax.plan.search import search_plan
from dflop_jax.train import planning, prepare

from .cases import BATCH, CONFIG, data_profile, model_profile

GIB = 2**30
BEST = Candidate("dflop", "best", 4, "none", 1.0, {"vision": 0.7, "llm": 0.9}, 1.0)


@pytest.mark.parametrize(
    "makespan_s, busy_s, says",
    [
        (1.2, {"vision": 1.1, "llm": 0.6}, "+20.0%: vision alone computes 1100.0 ms"),
        (1.1, {"vision": 0.55, "llm": 0.95}, "+10.0%: llm computes 950.0 ms, vision waits 50%"),
        (1.6, {"vision": 0.4, "llm": 0.8}, "+60.0%: even llm, the busiest, waits 50%"),
    ],
)
def test_why_a_placement_lost(makespan_s, busy_s, says):
    other = dataclasses.replace(BEST, name="other", makespan_s=makespan_s, busy_s=busy_s)
    assert why_it_lost(other, BEST) == says
    assert why_it_lost(BEST, BEST) == ""


def plan(n_devices, memory_bytes, hardware=None):
    big = dataclasses.replace(model_profile(), layer_param_bytes={"vision": GIB, "llm": 4 * GIB})
    return search_plan(
        big,
        data_profile(),
        n_devices=n_devices,
        global_batch=BATCH,
        config=dataclasses.replace(CONFIG, policy="auto", effort="quick"),
        memory_bytes=memory_bytes,
        hardware=hardware,
        refine=False,
    )


@pytest.mark.parametrize("gib", [10, 13, 20])
def test_how_many_devices_would_do_is_true(gib):
    with pytest.raises(ValueError, match="no plan fits") as failed:
        plan(2, gib * GIB)
    more = int(re.search(r"(\d+) devices would do", str(failed.value))[1])
    assert plan(more, gib * GIB).plan.n_devices == more
    with pytest.raises(ValueError, match="no plan fits"):
        plan(more // 2, gib * GIB)
    assert "so would" not in str(failed.value)  # it is this machine that is planned for


def test_which_hardware_would_do_is_true():
    l40s = find_hardware("l40s")
    with pytest.raises(ValueError, match="no plan fits") as failed:
        plan(2, 4 * GIB, l40s)
    assert re.search(r"(so would \w|\w would do)", str(failed.value))
    for h in HARDWARE.values():
        if re.search(rf"\b{h.name}\b", str(failed.value)):
            plan(2, h.memory_bytes * USABLE_MEMORY, h)


def test_when_no_number_of_devices_would_do_none_is_named():
    with pytest.raises(ValueError, match=r"GiB more; a larger plan\.max_model"):
        plan(2, 1000.0)


def elsewhere(**changes):
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=60),
        plan=PlanConfig(
            **{
                "hardware": "a100-80",
                "devices": 4,
                "policy": "auto",
                "effort": "quick",
                "max_microbatches": 4,
            }
            | changes
        ),
        train=TrainConfig(global_batch=16),
    )


@pytest.fixture(scope="module")
def setup_and_profile():
    setup = prepare.set_up(elsewhere())
    return setup, prepare.make_profile(setup, setup.source())


def test_planning_for_hardware_that_is_not_here(setup_and_profile):
    setup, profile = setup_and_profile
    assert setup.devices == []
    assert profile.model.device == "a100-80"
    assert {t.model for t in profile.model.timings} == {1, 2}
    result = planning.make_plan(setup, profile)
    assert result.plan.n_devices == 4
    assert all(b.tokens % 128 == 0 for b in result.plan.buckets)


def test_what_would_help_is_what_a_changed_search_finds(setup_and_profile):
    setup, profile = setup_and_profile
    found = {w.change: w.makespan_s for w in planning.what_would_help(setup, profile)}
    now = planning.make_plan(setup, profile, refine=False, shown=1).candidates[0].makespan_s
    assert found["as it is"] == now
    more = planning.make_plan(setup, profile, refine=False, shown=1, n_devices=8)
    assert found["twice the devices"] == more.candidates[0].makespan_s
    for change in ("twice the memory", "links between submeshes 8x", "half the work in vision"):
        assert 0 < found[change] <= now


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"hardware": "a1000"}, "unknown hardware 'a1000'; known: a100-40, a100-80"),
        ({"devices": 0}, "plan.devices=0 on a100-80: say how many devices"),
    ],
)
def test_hardware_that_cannot_be_planned_for(changes, says):
    with pytest.raises(ValueError, match=says):
        prepare.set_up(elsewhere(**changes))


@pytest.mark.parametrize("n", [1, 7, 13])
def test_one_device_and_prime_numbers_of_them(setup_and_profile, n):
    setup, profile = setup_and_profile
    result = planning.make_plan(setup, profile, n_devices=n)
    assert result.plan.n_devices == n


def test_no_device():
    with pytest.raises(ValueError, match="give at least one of each"):
        plan(0, 0.0)
