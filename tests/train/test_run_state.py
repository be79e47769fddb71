"""The plan, profile and prices that a resumed run reuses, by the settings of both runs."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dflop_jax import Config, PlanConfig, TrainConfig
from dflop_jax.checkpoint.format import OtherVersion
from dflop_jax.records import Price, PriceList, Prices, ProgramId, Shape
from dflop_jax.train.resume import (
    RunState,
    flag_settings,
    is_other_device_count,
    read_state,
    reuse_state,
)

from ..plans import NANO, bucket, nano_profile

PROFILE = nano_profile()
PRICES = PriceList.from_prices(Prices({ProgramId("l0", Shape(1, 160), "forward"): Price(1.0)}))
DEVICES = {
    "processes": 2,
    "devices": 8,
    "kind of device": "cpu",
    "memory of a device": 100,
    "frozen parts": "none",
}
CONFIG = Config(plan=PlanConfig(buckets=2, zero="1"), train=TrainConfig(remat="auto"))


def settings(config: Config = CONFIG, **devices) -> dict:
    return {**flag_settings(config), **DEVICES, **devices}


STORED = RunState(9, {"step": 9}, NANO, PROFILE, PRICES, settings())


def changed(section: str, **values) -> Config:
    return dataclasses.replace(
        CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **values)}
    )


@pytest.mark.parametrize(
    "now",
    [
        settings(),
        settings(changed("train", steps=7, eval_samples=3, learning_rate=1.0, profile_steps="1:2")),
        settings(changed("checkpoint", every=1, keep=9)),
        settings(changed("data", workers=7, path="elsewhere", root=("elsewhere",))),
        settings(changed("plan", redecide_every=5, devices=8)),
        settings(changed("schedule", work=3, correct=False, ahead=9)),
        settings(dataclasses.replace(CONFIG, run_dir="elsewhere", cache_dir="elsewhere")),
        # jax's limit of a device's memory varies by some bytes.
        settings(**{"memory of a device": 99}),
    ],
)
def test_settings_that_decide_no_plan_keep_the_whole_state(now):
    assert reuse_state(STORED, now, None, None) == (STORED, "")


@pytest.mark.parametrize(
    "now, changes, keeps_profile",
    [
        (settings(changed("plan", buckets=1)), "plan.buckets 1 (was 2)", True),
        (
            settings(changed("plan", buckets=1, zero="3")),
            "plan.buckets 1 (was 2); plan.zero 3 (was 1)",
            True,
        ),
        (settings(changed("plan", memory_bytes=5e9)),
         "plan.memory_bytes 5000000000.0 (was 0.0)", True),
        (settings(changed("train", remat="layers")), "train.remat layers (was auto)", True),
        (settings(**{"memory of a device": 50}), "memory of a device 50 (was 100)", True),
        (settings(changed("plan", max_model=4)), "plan.max_model 4 (was 0)", False),
        (settings(changed("data", max_tokens=99)), "data.max_tokens 99 (was 1024)", False),
        (settings(changed("data", tokenizer="t")), "data.tokenizer t (was empty)", False),
        (settings(**{"kind of device": "h100"}), "kind of device h100 (was cpu)", False),
    ],
)  # fmt: skip
def test_settings_that_decide_plans_are_named_and_planned_for(now, changes, keeps_profile):
    state, message = reuse_state(STORED, now, None, None)
    assert (state.plan, state.prices, state.step) == (None, None, 9)
    assert state.profile == (PROFILE if keeps_profile else None)
    assert message == f"{changes}: planning anew"


@pytest.mark.parametrize(
    "now, factor",
    [(settings(devices=4), 0.5), (settings(devices=16), 2.0), (settings(processes=1), 1.0)],
)
def test_a_measured_profile_serves_every_number_of_devices(now, factor):
    state, _ = reuse_state(STORED, now, None, None)
    assert state.plan is None
    assert is_other_device_count(STORED.settings, now)
    model = state.profile.model
    assert model.concurrency == PROFILE.model.concurrency * factor
    assert dataclasses.replace(model, concurrency=PROFILE.model.concurrency) == PROFILE.model
    assert state.profile.data == PROFILE.data
    # Kinds of devices do not serve each other, whatever their number.
    other, _ = reuse_state(STORED, {**now, "kind of device": "h100"}, None, None)
    assert other.profile is None


def test_given_plan_and_profile_go_before_the_stored_ones():
    other, profile = NANO.with_layout(buckets=(bucket(9, 99),)), nano_profile()
    now = settings(changed("plan", max_model=4))

    def reused(now, plan, profile):
        state, _ = reuse_state(STORED, now, plan, profile)
        return state.plan, state.profile, state.prices

    assert reused(settings(), NANO, profile) == (NANO, profile, PRICES)
    assert reused(now, NANO, profile) == (NANO, profile, None)
    assert reused(settings(), other, None) == (other, PROFILE, None)
    assert reused(now, None, profile) == (None, profile, None)


def test_other_trained_parts_are_refused_before_anything_is_planned():
    now = settings(changed("plan", buckets=1), **{"frozen parts": "vision"})
    with pytest.raises(ValueError, match="trained with none frozen, this run with vision"):
        reuse_state(STORED, now, None, None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 3}, "its state has version 3, this program reads 4"),
        ({"version": None}, "its state has version None"),
        ({"plan": {"policy": 7}}, "another version of this program: .*plan.policy"),
        ({"settings": 3}, "another version of this program: .*settings"),
    ],
)
def test_a_state_of_another_version_is_refused(change, message):
    with pytest.raises(OtherVersion, match=message):
        read_state({**msgspec.to_builtins(STORED), **change})
