"""A run that resumes on another number of devices: it plans anew, nothing is measured again, and
the training is the same to rounding."""

from __future__ import annotations

import dataclasses

import pytest

from dflop_jax import PlanConfig
from dflop_jax.records import Plan
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import choose_plan, profiling
from dflop_jax.train.trainer import Trainer

from ..plans import load as load_of
from .resume_cases import (  # noqa: F401
    CACHE,
    CONFIG,
    STEPS,
    _in_a_folder_of_its_own,
    as_killed,
    essence,
    quick,
    whole,
)

compile_all = Executor.compile  # before `quick` has one plan's for all
FEWER = PlanConfig(
    policy="dflop", devices=2, buckets=1, effort="quick", max_microbatches=4, finalists=0
)


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
    assert "planning anew" in said
    assert "profiling" not in said
    plan = load(Plan, killed / "plan.json")
    assert max(m.devices.stop for m in plan.layout.submeshes) <= 2
    assert_trained_alike(killed, whole)
