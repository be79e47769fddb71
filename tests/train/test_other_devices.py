"""Planning: again on fewer devices without measuring, and for devices that are not here."""

from __future__ import annotations

import dataclasses

import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.records import Plan
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import choose_plan, planning, profiling, run_context
from dflop_jax.train.trainer import Trainer

from ..plans import load as load_of
from .resume_cases import CACHE, CONFIG, STEPS, as_killed, essence

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")

compile_all = Executor.compile  # before `quick` has one plan's for all
FEWER = PlanConfig(policy="dflop", devices=2, buckets=1, effort="quick", max_microbatches=4)


def never(*args, **more):
    raise AssertionError("this is not to be done again")


@pytest.fixture
def killed(whole, monkeypatch):
    """A run that was killed on 8 devices."""
    monkeypatch.setattr(Executor, "compile", compile_all)
    for module, name in (
        (profiling, "time_layers"),
        (profiling, "profile_data"),
        (profiling, "make_profile"),
        (profiling, "measure_concurrent_rate"),
    ):
        monkeypatch.setattr(module, name, never)
    reuse_state = choose_plan.reuse_state

    def with_tail(*args):
        """The made-up profile lacks the longest samples, which no plan would then have room for."""
        state, message = reuse_state(*args)
        data = dataclasses.replace(state.profile.data, tail=(load_of(8, 160),))
        profile = dataclasses.replace(state.profile, data=data)
        return dataclasses.replace(state, profile=profile), message

    monkeypatch.setattr(choose_plan, "reuse_state", with_tail)
    return as_killed(whole, saved=9, rows=11)


def fit_on_two(folder):
    config = dataclasses.replace(CONFIG, run_dir=str(folder), plan=FEWER, **CACHE)
    Trainer(config, existing="resume").fit()


def assert_trained_alike(folder, undisturbed):
    assert essence(folder)[:9] == essence(undisturbed)[:9]
    losses, expected = ([r["loss"] for r in read_metrics(f)] for f in (folder, undisturbed))
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-4)


def test_fewer_devices_plan_anew_and_profile_nothing(killed, whole, capsys):
    fit_on_two(killed)
    said = " ".join(capsys.readouterr().err.split())
    assert "devices 2 (was 8)" in said
    assert "planning again" in said
    assert "profiling" not in said
    plan = load(Plan, killed / "plan.json")
    assert max(m.devices.stop for m in plan.layout.submeshes) <= 2
    assert_trained_alike(killed, whole)


def elsewhere(**changes):
    return Config(
        model=ModelConfig(factory="tests.small:build"),
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


def test_values_that_no_layer_names_cannot_be_kept(place_and_profile):
    place, profile = place_and_profile
    named = dataclasses.replace(place.config.train, remat="named")
    place = dataclasses.replace(place, config=dataclasses.replace(place.config, train=named))
    with pytest.raises(ValueError, match=r"named: the layers of 'vision' name no value .* dots"):
        planning.make_plan(place, profile)
