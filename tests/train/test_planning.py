"""Planning for devices that are not here, and what would help."""

import dataclasses

import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.train import planning, profiling, run_context


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
def place_and_profile():
    place = run_context.make_run_context(elsewhere())
    return place, profiling.make_profile(place, place.source())


@pytest.mark.slow
def test_what_would_help_is_what_a_changed_search_finds(place_and_profile):
    place, profile = place_and_profile
    found = {w.change: w.makespan_s for w in planning.evaluate_changes(place, profile)}
    now = planning.make_plan(place, profile, refine=False, n_shown=1).candidates[0].makespan_s
    assert found["as it is"] == now
    more = planning.make_plan(place, profile, refine=False, n_shown=1, n_devices=8)
    assert found["twice the devices"] == more.candidates[0].makespan_s
    for change in ("twice the memory", "links 8x", "half the work in vision"):
        assert 0 < found[change] <= now


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("n", [1, 7, 13])
def test_one_device_and_prime_numbers_of_them(place_and_profile, n):
    place, profile = place_and_profile
    result = planning.make_plan(place, profile, n_devices=n)
    assert result.plan.layout.n_devices == n


def test_values_that_no_layer_names_cannot_be_kept(place_and_profile, monkeypatch):
    place, profile = place_and_profile
    named = dataclasses.replace(place.config.train, remat="named")
    place = dataclasses.replace(place, config=dataclasses.replace(place.config, train=named))
    assert planning.make_plan(place, profile, refine=False, n_shown=1)
    monkeypatch.setattr(planning, "residual_bytes", lambda *_, **__: 64.0)
    with pytest.raises(ValueError, match=r"named: the layers of 'vision' name no value .* dots"):
        planning.make_plan(place, profile)
